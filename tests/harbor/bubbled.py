"""An environment of Harbor's that needs no engine: bubblewrap over the root file system of environments/sandbox, for
exported tasks only.

The Dockerfile is not run; what it copies is copied. There is no network and one user, so the verifier's grader has no
second one."""

import asyncio
import os
import shutil
import tempfile
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

from environments.harbor.verify import APP
from environments.sandbox.cache import owner
from environments.sandbox.root import root_file_system

FOLDERS = (APP, "/logs", "/solution", "/tests", "/tmp", "/work")
"""What commands may write to."""
LOGS = ("agent", "artifacts", "verifier")


class Bubbled(BaseEnvironment):
    @staticmethod
    def type() -> str:
        return "bubblewrap"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        if not (self.environment_dir / "Dockerfile").exists():
            raise FileNotFoundError("the task has no environment/Dockerfile")

    def at(self, path: str) -> Path:
        """Where a path of the environment lies on this machine."""
        return self.folder / path.lstrip("/")

    def give(self) -> None:
        """All files to the user who runs the commands."""
        if (user := owner()) is not None:
            for below, _, names in os.walk(self.folder):
                for path in (below, *(os.path.join(below, name) for name in names)):
                    os.chown(path, user, user, follow_symlinks=False)

    async def start(self, force_build: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="etude-harbor-"))
        for name in FOLDERS:
            self.at(name).mkdir()
        for name in LOGS:
            self.at(f"/logs/{name}").mkdir()
        shutil.copytree(self.environment_dir / APP.lstrip("/"), self.at(APP), dirs_exist_ok=True)
        self.give()

    async def stop(self, delete: bool) -> None:
        shutil.rmtree(self.folder)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        self.at(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source_path, self.at(target_path))
        self.give()

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, self.at(target_dir), symlinks=True, dirs_exist_ok=True)
        self.give()

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        shutil.copyfile(self.at(source_path), target_path, follow_symlinks=False)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self.at(source_dir), target_dir, symlinks=True, dirs_exist_ok=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None) -> ExecResult:
        root, other = root_file_system(), owner()
        words = [] if other is None else ["setpriv", f"--reuid={other}", f"--regid={other}", "--clear-groups", "--"]
        words += [
            "bwrap",
            "--unshare-all",
            "--die-with-parent",
            "--new-session",
            "--cap-drop",
            "ALL",
            "--proc",
            "/proc",
            "--dev",
            "/dev",
        ]
        words += ["--uid", "1000", "--gid", "1000"]
        for name in ("etc", "usr"):
            words += ["--ro-bind", str(root / name), f"/{name}"]
        for name, there in (("bin", "bin"), ("lib", "lib"), ("lib64", "lib")):
            words += ["--symlink", f"usr/{there}", f"/{name}"]
        for name in FOLDERS:
            words += ["--bind", str(self.at(name)), name]
        words += ["--chdir", cwd or APP, "/bin/sh", "-c", command]
        pipe = asyncio.subprocess.PIPE
        environment = {"PATH": os.environ["PATH"], "HOME": "/tmp", **(env or {})}
        child = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environment
        )
        try:
            out, errors = await asyncio.wait_for(child.communicate(), timeout_sec)
        except TimeoutError:
            child.kill()
            out, errors = await child.communicate()
        return ExecResult(
            stdout=out.decode(errors="replace"),
            stderr=errors.decode(errors="replace"),
            return_code=child.returncode or 0,
        )
