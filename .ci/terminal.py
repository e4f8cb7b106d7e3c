"""Prints docs/images/terminal.svg: a training run in a terminal, recorded from one.

.venv/bin/python .ci/terminal.py > docs/images/terminal.svg
"""

import io
import os
import pty
import re
import shutil
import signal
import struct
import sys
import tempfile
from fcntl import ioctl
from termios import TIOCSWINSZ

from rich.console import Console
from rich.text import Text

WIDTH, HEIGHT = 110, 30
COMMAND = "python -m spmdtrain.run --config experiments/digits_mlp.py --epochs 12"
LAST = re.compile(rb"eval at step 183.*?(?:\x1b\[2K.*?){3}", re.S)  # and some pictures of the bar


def recorded() -> bytes:
    """Returns what the command writes to a terminal, until it shows `LAST`."""
    folder = tempfile.mkdtemp()
    process, terminal = pty.fork()
    if process == 0:
        os.environ |= {"JAX_PLATFORMS": "cpu", "TERM": "xterm-256color", "COLUMNS": str(WIDTH)}
        words = [*COMMAND.split()[1:], "--workdir", folder]
        os.execv(sys.executable, [sys.executable, *words])
    ioctl(terminal, TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    output = b""
    while not LAST.search(output):
        try:
            output += os.read(terminal, 1000)
        except OSError:  # the command has ended
            sys.exit(f"the command has ended before {LAST.pattern!r}:\n{output.decode()}")
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    shutil.rmtree(folder)
    return output


def screen(output: str) -> list[str]:
    """Returns the lines of the terminal after an output, with their colors.

    Only what rich's progress bars need: the cursor moves up, and lines are erased as a whole.
    """
    lines, row = [""], 0
    for part in re.split(r"(\r?\n|\r|\x1b\[\d*[A-Zac-l]|\x1b\[\?\d+[hl])", output):
        if part.endswith("\n"):
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part == "\x1b[1A":
            row -= 1
        elif part and part != "\r" and not re.match(r"\x1b\[\??\d*[^m\d]", part):
            lines[row] += part
    return lines


if __name__ == "__main__":
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(f"$ {COMMAND}", highlight=False)
    shown = screen(recorded().decode(errors="ignore").rpartition("\r\x1b[2K")[0])
    for line in map(Text.from_ansi, shown):
        for part in line.divide(range(WIDTH, len(line), WIDTH)):  # a terminal breaks lines anywhere
            console.print(part, highlight=False, soft_wrap=True)
    # rich's style would load a font from another host.
    picture = console.export_svg(title="spmdtrain")
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.S)
    picture = picture.replace("Fira Code", "Menlo, Consolas, DejaVu Sans Mono")
    sys.stdout.write(picture)
