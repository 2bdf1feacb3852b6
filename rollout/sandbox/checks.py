"""What keeps the local sandbox from working on this host, each with the command that mends it (`doctor`)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from rollout.sandbox import limits

TRIAL_S = 20.0
TRIAL = (
    *("--unshare-user", "--disable-userns", "--unshare-pid", "--unshare-net", "--uid", "1000", "--gid", "1000"),
    *("--die-with-parent", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"),
    *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev", "true"),
)
SWITCHES = {
    "kernel/unprivileged_userns_clone": ("0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    "user/max_user_namespaces": ("0", "sysctl -w user.max_user_namespaces=15000"),
    "kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile for bwrap",
    ),
}
"""File below /proc/sys -> (the value that forbids user namespaces, what to do as root)."""


def check_local() -> list[str]:
    """Empty when a sandbox can be started here. Blocks for up to TRIAL_S seconds."""
    problems = []
    if not Path("/usr/bin/python3").exists():
        problems.append("/usr/bin/python3 is missing, harness programs run by it: apt-get install python3")
    if unlimited := limits.pids_problem(limits.host_cgroups()):
        problems.append(unlimited)
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return [*problems, "bubblewrap is missing: apt-get install bubblewrap"]
    try:
        trial = subprocess.run([bwrap, *TRIAL], capture_output=True, text=True, timeout=TRIAL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [*problems, f"bubblewrap could not be tried: {error}"]
    if trial.returncode == 0:
        return problems
    said = trial.stderr.strip()[-300:]
    if "nknown option" in said:
        return [*problems, f"bubblewrap is older than 0.8: install a newer one ({said})"]
    mends = _switched_off() or ["allow user namespaces on this host, or in the container that this runs in"]
    return [*problems, f"bubblewrap cannot make a user namespace ({said}): {'; '.join(mends)}"]


def _switched_off() -> list[str]:
    mends = []
    for name, (bad, mend) in SWITCHES.items():
        path = Path("/proc/sys") / name
        if path.exists() and path.read_text().strip() == bad:
            mends.append(mend)
    return mends
