"""Lets the environment of this interpreter see the packages of another one, editable ones included.

Usage: python see_environment.py PATH_OF_THE_OTHER
"""

import sys
import sysconfig
from pathlib import Path

other = Path(sys.argv[1]).resolve()
version = f"python{sys.version_info.major}.{sys.version_info.minor}"
packages = other / "lib" / version / "site-packages"
if not packages.is_dir():
    sys.exit(f"{packages} is not there: both environments need the same Python")
here = Path(sysconfig.get_path("purelib"))
(here / "other-environment.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
