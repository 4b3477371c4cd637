"""Reads examples/cluster as the schedulers do: SkyPilot's own parser, and Kubernetes' schema of a job, strictly. What
the files start is tested in tests/mirror/test_cluster_files.py.

    make test-cluster
"""

import copy
from pathlib import Path

import kubernetes_validate
import sky
import yaml

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "cluster"
KUBERNETES = ("1.31", "1.34")


def refuses(read, *arguments) -> bool:
    try:
        read(*arguments)
    except Exception:
        return True
    return False


def check_kubernetes() -> None:
    documents = [*yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())]
    for version in KUBERNETES:
        for document in documents:
            kubernetes_validate.validate(document, version, strict=True)
            misspelt = copy.deepcopy(document)
            misspelt["spec"]["zebra"] = 1
            assert refuses(kubernetes_validate.validate, misspelt, version, True), "the schema reads nothing"
    print(f"kubernetes.yaml: valid in Kubernetes {' and '.join(KUBERNETES)}")


def check_skypilot() -> None:
    config = yaml.safe_load((FOLDER / "sky.yaml").read_text())
    (resources,) = sky.Task.from_yaml_config(copy.deepcopy(config)).resources
    assert resources.accelerators == {"H200": 8} and resources.job_recovery["recover_on_exit_codes"] == [75]
    misspelt = config | {"resources": config["resources"] | {"zebra": 1}}
    assert refuses(sky.Task.from_yaml_config, misspelt), "the parser reads nothing"
    print(f"sky.yaml: SkyPilot {sky.__version__} reads it")


if __name__ == "__main__":
    check_kubernetes()
    check_skypilot()
