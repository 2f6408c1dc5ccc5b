# SPDX-License-Identifier: Apache-2.0
"""Write the commands that install carryforward in the documentation, as `utils/install.py` has them.

python docs/install_commands.py           # rewrites README.md, docs/ and examples/
python docs/install_commands.py --check   # only says which pages would change
"""

import re
import sys
from pathlib import Path

from carryforward.utils.install import install_command

ROOT = Path(__file__).resolve().parent.parent
COMMAND = re.compile(r"""pip install (?:-e )?(["']?)(?:\.|carryforward)(?:\[([\w,-]+)\])?\1(?=[\s`)]|$)""")


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("*.*"))]


def refreshed(text: str) -> str:
    """The text with all commands that install carryforward as they are now."""
    return COMMAND.sub(lambda match: install_command(*(match[2].split(",") if match[2] else ())), text)


def main() -> None:
    stale = [page for page in pages() if refreshed(page.read_text()) != page.read_text()]
    for page in stale:
        print(page.relative_to(ROOT))
        if "--check" not in sys.argv:
            page.write_text(refreshed(page.read_text()))
    sys.exit("--check" in sys.argv and bool(stale))


if __name__ == "__main__":
    main()
