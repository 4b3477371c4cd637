"""What an installed etude is: its rooms under names of their own beside the Hub's `kernels`, from a wheel and from an
editable install."""

import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("kit", "ref", "kernels", "scaled", "recipe", "sims", "environments", "lessons", "etude")
HUB = {
    "kernels/__init__.py": 'def get_kernel(name):\n    return f"the Hub\'s {name}"\n',
    "kernels-0.17.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: kernels\nVersion: 0.17.2\n",
    "kernels-0.17.2.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: "
    "py3-none-any\n",
    "kernels-0.17.2.dist-info/RECORD": "",
}
"""A wheel in place of the Hub's distribution: its name, and the function that `transformers` wants of it."""
PROGRAM = """
import kernels, sys
assert kernels.get_kernel("x") == "the Hub's x", kernels.__file__
import scaled.quant
from scaled.network import model
from scaled.runtime import engine
assert not any(name.startswith("etude_kernels") for name in sys.modules), "no kernel is imported before it is wanted"
for name in ("launch", "experts", "linear_logprob"):
    module = engine.kernel(name)
    assert module.__name__ == f"etude_kernels.{name}" and module is engine.kernel(name), module
print(engine.kernel("experts").__file__, scaled.__file__)
import etude.bench.kernel_cases
assert not any(name.startswith("kernels.") for name in sys.modules), "one name only"
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy to build from, which leaves files where it works; and beside it a distribution called kernels."""
    folder = tmp_path_factory.mktemp("source")
    for name in ROOMS:
        shutil.copytree(ROOT / name, folder / "etude" / name, ignore=shutil.ignore_patterns("__pycache__", "notebooks"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "etude")
    with zipfile.ZipFile(folder / "kernels-0.17.2-py3-none-any.whl", "w") as wheel:
        for name, text in HUB.items():
            wheel.writestr(name, text)
    return folder


@pytest.mark.parametrize("way", ["wheel", "editable"])
def test_an_installed_etude_leaves_kernels_to_the_hub(source, tmp_path, way):
    """In an environment of its own, which finds torch and the others where these tests do."""
    home, scripts = tmp_path / "home", tmp_path / "home" / "bin"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    (own / "others.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", scripts / "python", "--disable-pip-version-check", "-q"]
    wanted = [*(["-e"] if way == "editable" else []), source / "etude", *source.glob("*.whl")]
    done = subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--no-build-isolation", *wanted], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

    def played(*words):
        done = subprocess.run(
            [scripts / "python", "-P", *words], cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    files = played("-c", PROGRAM).split()
    assert all(Path(file).is_relative_to(own if way == "wheel" else source) for file in files), files
    assert (own / "kernels" / "__init__.py").read_text().startswith("def get_kernel") and (
        own / "etude_kernels"
    ).exists() == (way == "wheel")
    assert "etude run recipe" in played(scripts / "etude", "--help")
    if way == "wheel":
        for words in (("explore",), ("lesson", "5"), ("claims",)):
            done = subprocess.run(
                [scripts / "etude", *words], cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True
            )
            assert done.returncode == 2 and " clone " in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_every_folder_of_code_is_installed():
    """The list in pyproject.toml names them one by one, since one of them has another name there."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
    }
    assert set(told["packages"]) == {"etude_kernels" if name == "kernels" else name for name in found}
    assert told["package-dir"] == {"etude_kernels": "kernels"}
