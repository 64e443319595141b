"""The built-in models in MLX: the same functions, shapes and parameter names as those in torch (extra [mlx])."""

from shardwise.errors import MissingExtraError

try:
    import mlx.core  # noqa: F401 - asked first, so that one sentence answers for every name below
except ImportError as error:
    raise MissingExtraError.of("shardwise.models.mlx", "mlx") from error

from shardwise.models.mlx.decoder import MlxDecoder, decoder
from shardwise.models.mlx.resnet import MlxResNet, resnet18, resnet34, resnet50

__all__ = ["MlxDecoder", "MlxResNet", "decoder", "resnet18", "resnet34", "resnet50"]
