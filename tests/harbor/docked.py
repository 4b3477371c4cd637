"""The same environment in containers of a Docker engine: the root file system of environments/sandbox as an image, a
container for each command.

Harbor has an environment for Docker of its own. It needs the plugin compose, and builds the task's Dockerfile from an
image of Python's, which a registry must give.
"""

import asyncio
import os
import uuid

from harbor.environments.base import ExecResult

from environments.harbor.verify import APP
from environments.sandbox.cache import owner
from tests.harbor.bubbled import FOLDERS, Bubbled


class Docked(Bubbled):
    @staticmethod
    def type() -> str:
        return "containers"

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None) -> ExecResult:
        """ETUDE_IMAGE names the image."""
        name, other = f"etude-harbor-{uuid.uuid4().hex}", owner() or os.getuid()
        words = ["docker", "run", "--rm", "--name", name, "--network", "none", "--read-only", "--cap-drop", "ALL"]
        words += ["--security-opt", "no-new-privileges", "--user", f"{other}:{other}", "--workdir", cwd or APP]
        for folder in FOLDERS:
            words += ["--volume", f"{self.at(folder)}:{folder}"]
        for key, value in {"HOME": "/tmp", **(env or {})}.items():
            words += ["--env", f"{key}={value}"]
        pipe = asyncio.subprocess.PIPE
        words += [os.environ["ETUDE_IMAGE"], "/bin/sh", "-c", command]
        child = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe)
        try:
            out, errors = await asyncio.wait_for(child.communicate(), timeout_sec)
        except TimeoutError:
            await (
                await asyncio.create_subprocess_exec("docker", "kill", name, stdout=asyncio.subprocess.DEVNULL)
            ).wait()
            out, errors = await child.communicate()
        return ExecResult(
            stdout=out.decode(errors="replace"),
            stderr=errors.decode(errors="replace"),
            return_code=child.returncode or 0,
        )
