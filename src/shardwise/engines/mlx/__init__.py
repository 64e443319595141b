"""The MLX engine: trains mlx.nn.Modules with data parallelism over MLX's communication ring or MPI."""
