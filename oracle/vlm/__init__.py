"""mlx-vlm's drafters, asked line by line, for the environment that mlx-vlm lives in.

``oracle.drafters`` starts ``python -I .../oracle/vlm/__main__.py`` there. Nothing of ours is
installed in that environment: these modules import mlx, mlx-vlm, numpy, the standard library and
each other. Read ``serve`` (the protocol), ``pair`` (the answers), then what they use.
"""
