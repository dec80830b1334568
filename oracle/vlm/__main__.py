"""Start ``serve`` from this file's path: the package is made of this folder, under another name."""

import importlib
import importlib.util
import sys
from pathlib import Path

NAME = "oracle_vlm"

if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location(
        NAME, here / "__init__.py", submodule_search_locations=[str(here)]
    )
    assert spec is not None
    sys.modules[NAME] = importlib.util.module_from_spec(spec)
    importlib.import_module(f"{NAME}.serve").main()
