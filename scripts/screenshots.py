"""Makes the pictures of README.md: `python scripts/screenshots.py`, into docs/images.

It needs playwright and a Chromium (`pip install playwright`, and Debian's `chromium` or `playwright install chromium`).
The default model answers, greedily, so the pictures change only when the interface does.
"""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
QUESTION = "Write a Python function that returns the n-th Fibonacci number, and explain it in two sentences."
DONE = ".message.assistant:last-child:not([aria-busy]) > footer .facts:not(:empty)"
PORT = 5177


def main() -> None:
    """Make every picture."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    web_chat()
    terminal_chat(["What is the capital of France?", "And what is it known for?", "/exit"])


def web_chat() -> None:
    """The web chat after one answer, light and dark."""
    server = subprocess.Popen([sys.executable, "-m", "exlm", "serve", "--port", str(PORT)])
    try:
        wait_until_ready(f"http://127.0.0.1:{PORT}/health/ready")
        with sync_playwright() as driver, driver.chromium.launch(executable_path=shutil.which("chromium")) as browser:
            for scheme in ("light", "dark"):
                with browser.new_context(
                    color_scheme=scheme, viewport={"width": 1000, "height": 640}, device_scale_factor=1.5
                ) as context:
                    page = context.new_page()
                    page.goto(f"http://127.0.0.1:{PORT}")
                    page.wait_for_function("() => document.querySelector('#model').value")
                    page.click("#open-setup")
                    page.fill("#set-temperature", "0")
                    page.fill("#set-max_tokens", "220")
                    page.click("#open-setup")
                    page.fill("#draft", QUESTION)
                    page.press("#draft", "Enter")
                    page.wait_for_selector(DONE, timeout=120_000)
                    page.screenshot(path=IMAGES / f"web-chat-{scheme}.png")
    finally:
        server.terminate()
        server.wait()


def wait_until_ready(url: str, seconds: float = 120.0) -> None:
    """Wait until the server answers."""
    end = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def terminal_chat(lines: list[str]) -> None:
    """`exlm chat` in a terminal of 88 columns, as SVG."""
    options = ["--temperature", "0", "--max-new-tokens", "60", "--stats", "--no-history"]
    output = run_in_terminal([sys.executable, "-m", "exlm", "chat", *options], lines)
    console = Console(record=True, width=88, file=open(os.devnull, "w"))  # noqa: SIM115 - until the process ends
    console.print("[bold]$ exlm chat[/]")
    console.print(Text.from_ansi(visible_text(output)))
    svg = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="exlm chat"), flags=re.DOTALL)  # fonts of a CDN
    (IMAGES / "chat.svg").write_text(svg.replace("Fira Code", "DejaVu Sans Mono"), encoding="utf-8")


def run_in_terminal(command: list[str], lines: list[str]) -> str:
    """The output of a program that is typed to whenever it has been silent for two seconds."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS="88", LINES="40")
        os.execv(command[0], command)
    received, waiting = b"", list(lines)
    while True:
        ready, _, _ = select.select([terminal], [], [], 8.0 if waiting == lines else 3.0)
        try:
            if ready:
                received += os.read(terminal, 65536)
            elif waiting:
                os.write(terminal, waiting.pop(0).encode() + b"\n")
            else:
                break
        except OSError:  # the program has ended
            break
    os.close(terminal)
    os.waitpid(child, 0)
    return received.decode(errors="replace")


def visible_text(output: str) -> str:
    """What a terminal shows in the end: without cursor movements, progress lines and what was overwritten."""
    output = re.sub(r"\x1b\[\?[0-9;]*[hl]|\x1b\[[0-9;]*[A-HJKST]|\x1b[=>]|\x1b\][^\x07]*\x07|\x01|\x02", "", output)
    rows = [row.rstrip("\r").split("\r")[-1] for row in output.split("\n")]
    return "\n".join(row for row in rows if "Loading" not in row and "/exit" not in row).strip()


if __name__ == "__main__":
    main()
