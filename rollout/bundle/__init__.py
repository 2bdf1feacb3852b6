"""Task bundles: Harbor's task directory, read, checked and written.

    task.toml                    Harbor's fields; ours in [metadata.openforge], where Harbor's lint allows them
    instruction.md               what the policy is told
    environment/                 Dockerfile, files/ (the workspace at the start), services.json (seed states)
    tests/test.sh                the verifier, with whatever stands beside it
    solution/                    solve.sh, wrong/<name>.sh, plan.json (read by the scripted teacher)

`load_task` gives the frozen half (`TaskSpec`), `read_bundle` all of it, `write_bundle` lays one out at once or
not at all. `[openforge]` at the top level is read as well. Whatever is wrong is a ConfigError that names the file.
"""

from rollout.bundle.reading import digest_bundle, load_task, load_tasks, read_bundle
from rollout.bundle.spec import BundleSpec
from rollout.bundle.writing import write_bundle

__all__ = ["BundleSpec", "digest_bundle", "load_task", "load_tasks", "read_bundle", "write_bundle"]
