from .signals import leave_at_once

leave_at_once()  # importing mlx and transformers takes seconds

from .cli import main  # noqa: E402

main()
