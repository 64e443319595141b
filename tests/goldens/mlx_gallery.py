"""The jobs of the gallery whose models are MLX's, trained for a few steps in fp32 on one process."""

from goldens.entry import corpus, run_ranks
from goldens.gallery import jobs_of, shortened, trained

FILES = ("06-mlx/digits.py", "06-mlx/text.py")


def train(folder):
    """Train the jobs in a fork, since a process that has computed with MLX cannot be forked; return results by name."""

    def train_all(world):
        with corpus(folder):
            return {
                f"{name}:job:ddp": trained(shortened(name, jobs_of(name, folder)["job"]), "ddp", world, "fp32")
                for name in FILES
            }

    return run_ranks(train_all, 1)[0]
