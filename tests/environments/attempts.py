"""What is tried against a sandbox, by family, and where the same attempt succeeds.

Every target was made by the test: files, processes, sockets, shared memory. Nothing else is read, written, signalled or
connected to. Where an attempt cannot reach a target, opening or making something is already the finding.
"""

import platform
from dataclasses import dataclass

from environments.sandbox.seccomp import MACHINES, REFUSED

OUTSIDE, ROOT, WEAK, OWN = "outside", "outside, as root", "weak sandbox", "own"
"""Where the control runs: as a plain process; the same, if root runs the tests; in a sandbox of bwrap's with the
machine's files, all capabilities in its own namespaces and no filter; or none, for a reason that stands beside it."""


@dataclass(frozen=True)
class Attempt:
    control: str
    code: str
    why: str = ""
    """Why there is no control."""
    perhaps: bool = False
    """Whether this machine's kernel may lack what the attempt wants; then the control shows nothing."""


FILES = {
    "path": Attempt(OUTSIDE, "got = at['secret'] in open(at['marker']).read()"),
    "path with dots": Attempt(OUTSIDE, "got = at['secret'] in open('/proc/../usr/../../..' + at['marker']).read()"),
    "root of the first process": Attempt(WEAK, "got = find(['/proc/1/root' + at['marker']], at['secret'])"),
    "own root in /proc": Attempt(OUTSIDE, "got = find(['/proc/self/root' + at['marker']], at['secret'])"),
    "roots of all processes": Attempt(
        WEAK, "got = find([f'/proc/{p}/root' + at['marker'] for p in os.listdir('/proc') if p.isdigit()], at['secret'])"
    ),
    "working folders of all processes": Attempt(
        WEAK,
        "got = find([f'/proc/{p}/cwd/../../../../..' + at['marker'] for p in os.listdir('/proc') if "
        "p.isdigit()], at['secret'])",
    ),
    "environment of the first process": Attempt(WEAK, "got = find(['/proc/1/environ'], at['planted'])"),
    "environments of all processes": Attempt(
        OUTSIDE, "got = find([f'/proc/{p}/environ' for p in pids], at['planted'])"
    ),
    "own environment": Attempt(OUTSIDE, "got = at['planted'] in ''.join(os.environ.values())"),
    "inherited handles": Attempt(
        OUTSIDE,
        """
for handle in range(3, 512):
    try:
        os.lseek(handle, 0, 0)
        got = got or at['secret'].encode() in os.read(handle, 4096)
    except OSError:
        pass
""",
    ),
    "handles of all processes": Attempt(
        OUTSIDE, "got = find([f'/proc/{p}/fd/{n}' for p in pids for n in range(40)], at['secret'])"
    ),
    "symbolic link": Attempt(
        OUTSIDE, "os.symlink(at['marker'], at['own'] + '/l')\ngot = at['secret'] in open(at['own'] + '/l').read()"
    ),
    "link through a folder": Attempt(
        OUTSIDE, "os.symlink('/', at['own'] + '/d')\ngot = at['secret'] in open(at['own'] + '/d' + at['marker']).read()"
    ),
    "hard link": Attempt(
        OUTSIDE, "os.link(at['marker'], at['own'] + '/h')\ngot = at['secret'] in open(at['own'] + '/h').read()"
    ),
    "writing": Attempt(OUTSIDE, "open(at['writable'] + '/written', 'w').write('x')\ngot = True"),
    "renaming": Attempt(
        OUTSIDE,
        "open(at['own'] + '/r', 'w').close()\nos.rename(at['own'] + '/r', at['writable'] + '/renamed')\ngot = True",
    ),
    "named pipe": Attempt(
        OUTSIDE, "got = os.path.exists(at['pipe']) and os.open(at['pipe'], os.O_RDWR | os.O_NONBLOCK) > 0"
    ),
    "device node": Attempt(
        ROOT,
        "os.mknod(at['own'] + '/n', 0o20666, os.makedev(1, 3))\ngot = os.write(os.open(at['own'] + "
        "'/n', os.O_WRONLY), b'x') == 1",
    ),
    "devices": Attempt(
        OUTSIDE,
        "got = [n for n in ('mem', 'kmsg', 'ptmx', 'tty', 'fuse', 'kvm', 'vsock', 'loop-control') if "
        "os.path.exists('/dev/' + n)]",
    ),
    "/sys": Attempt(OUTSIDE, "got = os.listdir('/sys')"),
    "control groups": Attempt(OUTSIDE, "got = os.path.exists('/sys/fs/cgroup') or os.path.exists('/cgroup')"),
    "shared memory files": Attempt(OUTSIDE, "got = at['secret'] in open('/dev/shm/' + at['shared']).read()"),
    "the machine's /tmp": Attempt(
        OUTSIDE, "got = os.path.basename(at['folder']) in os.listdir(os.path.dirname(at['folder']))"
    ),
    "the machine's /etc": Attempt(OUTSIDE, "got = os.path.exists('/etc/os-release') or os.path.exists('/etc/shadow')"),
    "the user's home": Attempt(OUTSIDE, "got = os.path.exists(at['home'])"),
    "this repository": Attempt(OUTSIDE, "got = os.path.exists(at['repository'])"),
    "the machine's packages": Attempt(
        OUTSIDE, "import importlib.util\ngot = importlib.util.find_spec('hypothesis') is not None"
    ),
    "changing the system": Attempt(ROOT, "got = os.access('/usr/lib', os.W_OK)"),
    "core dumps to a program": Attempt(
        ROOT, "os.close(os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY))\ngot = True"
    ),
    "settings of the network": Attempt(
        ROOT, "os.close(os.open('/proc/sys/net/ipv4/ip_forward', os.O_WRONLY))\ngot = True"
    ),
    "system requests": Attempt(ROOT, "os.close(os.open('/proc/sysrq-trigger', os.O_WRONLY))\ngot = True", perhaps=True),
    "the kernel's memory": Attempt(
        OUTSIDE, "got = os.path.exists('/proc/kcore') and os.path.getsize('/proc/kcore') > 0", perhaps=True
    ),
    "keys": Attempt(OUTSIDE, "got = len(open('/proc/key-users').read()) > 0", perhaps=True),
    "the kernel's command line": Attempt(OUTSIDE, "got = open('/proc/cmdline').read() == at['cmdline']"),
    "trees of other sandboxes": Attempt(OUTSIDE, "got = os.listdir(at['store'])"),
    "what lies beneath the work tree": Attempt(
        OWN, "got = os.listdir('/base') + os.listdir('/run')", "these folders exist only inside"
    ),
    "starting set-user programs": Attempt(
        OUTSIDE, "got = any(not os.statvfs(p).f_flag & os.ST_NOSUID for p in ('/', at['own'], '/tmp', '/proc'))"
    ),
    "a file that has no end": Attempt(
        OUTSIDE, "with open(at['own'] + '/huge', 'wb') as f:\n    f.truncate(1 << 40)\ngot = True"
    ),
}
PROCESSES = {
    "seeing a process": Attempt(OUTSIDE, "got = find([f'/proc/{p}/cmdline' for p in pids], at['name'])"),
    "signalling a process": Attempt(
        OUTSIDE, "os.kill(at['process'], 10)\ngot = wait(lambda: os.path.exists(at['signalled']))"
    ),
    "signalling every process": Attempt(
        OWN,
        "os.kill(-1, 12)\ngot = wait(lambda: os.path.exists(at['signalled']))",
        "outside it would reach processes that the test did not start",
    ),
    "tracing a process": Attempt(OUTSIDE, "got = libc.ptrace(0x4206, at['process'], None, None) == 0"),
    "reading a process's memory": Attempt(
        OUTSIDE,
        """
kept, size = ctypes.create_string_buffer(64), 64
here = (ctypes.c_uint64 * 2)(ctypes.addressof(kept), size)
there = (ctypes.c_uint64 * 2)(at['address'], size)
call(310 if os.uname().machine == 'x86_64' else 270, at['process'], \
ctypes.addressof(here), 1, ctypes.addressof(there), 1, 0)
got = at['secret'].encode() in kept.raw
""",
    ),
    "a process's memory as a file": Attempt(
        OUTSIDE,
        "with open(f\"/proc/{at['process']}/mem\", 'rb') as f:\n    f.seek(at['address'])\n    got = "
        "at['secret'].encode() in f.read(64)",
    ),
    "taking a process's handle": Attempt(
        OUTSIDE,
        """
handle = os.pidfd_open(at['process'])
taken = call(438, handle, at['handle'], 0)[0]
got = taken >= 0 and at['secret'].encode() in os.pread(taken, 4096, 0)
""",
    ),
    "a process's processors": Attempt(
        OUTSIDE,
        "named = at['name'] in open(f\"/proc/{at['process']}/cmdline\").read()\ngot = named and "
        "len(os.sched_getaffinity(at['process'])) > 0",
    ),
    "ending the server": Attempt(
        OUTSIDE,
        """
for number in (2, 3, 9, 10, 12, 15, 19):
    os.kill(at['server'], number)
place = f"/proc/{at['server']}"
got = wait(lambda: not os.path.exists(place) or open(place + '/stat').read().rpartition(')')[2].split()[0] in 'ZX')
""",
    ),
    "tracing the server": Attempt(
        OUTSIDE, "got = libc.ptrace(0x4206, at['process'] if at['outside'] else 1, None, None) == 0"
    ),
    "the server's memory": Attempt(
        OUTSIDE, "os.close(os.open(f\"/proc/{at['process'] if at['outside'] else 1}/mem\", os.O_RDWR))\ngot = True"
    ),
    "the server's pipes": Attempt(OUTSIDE, "got = os.listdir(f\"/proc/{at['process'] if at['outside'] else 1}/fd\")"),
    "the server's limits": Attempt(
        OUTSIDE,
        """
import resource
resource.prlimit(at['process'] if at['outside'] else 1, resource.RLIMIT_NOFILE, (64, 64) if at['outside'] else (3, 3))
got = True
""",
    ),
    "the server's priority": Attempt(
        OUTSIDE,
        """
whose = os.PRIO_PROCESS, at['process'] if at['outside'] else 1
os.setpriority(*whose, os.getpriority(*whose))
got = True
""",
    ),
    "priorities of a user's processes": Attempt(
        OWN, "os.setpriority(os.PRIO_USER, 0, 7)\ngot = True", "outside it would reach all of this user's"
    ),
    "how the server is scheduled": Attempt(
        OUTSIDE,
        "os.sched_setscheduler(at['process'] if at['outside'] else 1, os.SCHED_BATCH, os.sched_param(0))\ngot = True",
    ),
    "shared memory": Attempt(OUTSIDE, "libc.shmget.restype = ctypes.c_int\ngot = libc.shmget(at['key'], 0, 0) >= 0"),
    "message queue": Attempt(OUTSIDE, "got = libc.msgget(at['key'], 0) >= 0"),
    "semaphores": Attempt(OUTSIDE, "got = libc.semget(at['key'], 0, 0) >= 0"),
}
CONNECT = "s = socket.create_connection(({host!r}, at['port']), 2)\ngot = at['secret'].encode() in s.recv(100)"
NETWORK = {
    **{
        f"loopback as {host}": Attempt(OUTSIDE, "import socket\n" + CONNECT.format(host=host))
        for host in ("127.0.0.1", "localhost", "0.0.0.0")
    },
    "loopback from a port of one's own": Attempt(
        OUTSIDE,
        """
import socket
s = socket.socket()
s.bind(('127.0.0.1', 0))
s.settimeout(2)
s.connect(('127.0.0.1', at['port']))
got = at['secret'].encode() in s.recv(100)
""",
    ),
    "loopback by IPv6": Attempt(
        OUTSIDE,
        """
import socket
s = socket.socket(10)
s.settimeout(2)
s.connect(('::ffff:127.0.0.1', at['port']))
got = at['secret'].encode() in s.recv(100)
""",
        perhaps=True,
    ),
    "a name server": Attempt(
        OUTSIDE,
        """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(1)
s.sendto(b'\\x12\\x34\\x01\\0\\0\\x01\\0\\0\\0\\0\\0\\0\\x07planted\\x04test\\0\\0\\x01\\0\\x01', \
('127.0.0.1', at['datagrams']))
got = at['secret'].encode() in s.recv(100)
""",
    ),
    "socket in a folder": Attempt(
        OUTSIDE,
        "import socket\ns = socket.socket(1)\ns.connect(at['socket'])\ngot = at['secret'].encode() in s.recv(100)",
    ),
    "abstract socket": Attempt(
        OUTSIDE,
        "import socket\ns = socket.socket(1)\ns.connect('\\0' + at['abstract'])\ngot = "
        "at['secret'].encode() in s.recv(100)",
    ),
    "seeing a listening port": Attempt(OUTSIDE, "got = f\":{at['port']:04X} \" in open('/proc/net/tcp').read()"),
    "seeing abstract sockets": Attempt(OUTSIDE, "got = at['abstract'] in open('/proc/net/unix').read()"),
    "AF_VSOCK": Attempt(OUTSIDE, "import socket\ngot = socket.socket(40, 1).fileno() >= 0", perhaps=True),
    "AF_NETLINK": Attempt(OUTSIDE, "import socket\ngot = socket.socket(16, 3, 0).fileno() >= 0"),
    "AF_PACKET": Attempt(WEAK, "import socket\ngot = socket.socket(17, 3, 0).fileno() >= 0"),
    "AF_ALG": Attempt(OUTSIDE, "import socket\ngot = socket.socket(38, 5, 0).fileno() >= 0", perhaps=True),
    "raw socket": Attempt(WEAK, "import socket\ngot = socket.socket(2, 3, 1).fileno() >= 0"),
    "echo socket": Attempt(
        WEAK,
        "import socket\nopen('/proc/sys/net/ipv4/ping_group_range', 'w').write('0 0')\ngot = "
        "socket.socket(2, 2, 1).fileno() >= 0",
    ),
    "a protocol that is a module": Attempt(
        OUTSIDE, "import socket\ngot = socket.socket(2, 1, 262).fileno() >= 0", perhaps=True
    ),
    "any other family": Attempt(
        OUTSIDE,
        """
import socket
got = []
for family in set(range(60)) - {1, 2, 10}:
    for kind in (1, 2, 3, 5):
        try:
            got.append([family, socket.socket(family, kind, 0).fileno()])
        except OSError:
            pass
""",
    ),
    "a pair of another family": Attempt(
        OUTSIDE, "got = call(53 if os.uname().machine == 'x86_64' else 199, 16, 3, 0, -1)[1] != 'EAFNOSUPPORT'"
    ),
    "an address for an interface": Attempt(
        WEAK,
        """
import fcntl, socket, struct
fcntl.ioctl(socket.socket(2, 2), 0x8916, struct.pack('16sHH4s8x', b'lo', 2, 0, bytes([127, 0, 0, 9])))
got = True
""",
    ),
}
PRIVILEGE = {
    "becoming root": Attempt(WEAK, "os.setuid(0)\ngot = os.getuid() == 0"),
    "becoming another user": Attempt(ROOT, "os.setresuid(12345, 12345, 12345)\ngot = True"),
    "another group": Attempt(ROOT, "os.setgroups([0])\ngot = True"),
    "capabilities": Attempt(
        WEAK, "got = any(int(line.split()[1], 16) for line in open('/proc/self/status') if line.startswith('Cap'))"
    ),
    "capabilities of a file": Attempt(
        WEAK,
        "open('/tmp/c', 'w').close()\nos.setxattr('/tmp/c', 'security.capability', b'\\x01\\0\\0\\x02' "
        "+ b'\\xff' * 16)\ngot = True",
    ),
    "new privileges": Attempt(OUTSIDE, "got = libc.prctl(39, 0, 0, 0, 0) == 0 or libc.prctl(38, 0, 0, 0, 0) == 0"),
    "user namespace": Attempt(WEAK, "got = libc.unshare(0x10000000) == 0"),
    **{
        f"{name} namespace by clone": Attempt(
            WEAK,
            f"number = 56 if os.uname().machine == 'x86_64' else 220\npid = call(number, {flag} | 17, 0, 0, 0, 0)[0]\n"
            "if pid == 0:\n    os._exit(0)\ngot = pid > 0",
        )
        for name, flag in (
            ("user", 0x10000000),
            ("mount", 0x20000),
            ("process", 0x20000000),
            ("network", 0x40000000),
            ("IPC", 0x8000000),
        )
    },
    "namespaces left": Attempt(OUTSIDE, "got = int(open('/proc/sys/user/max_user_namespaces').read()) > 0"),
    "entering a namespace": Attempt(WEAK, "got = libc.setns(os.open('/proc/1/ns/net', os.O_RDONLY), 0) == 0"),
    "mounting": Attempt(
        WEAK, "os.makedirs('/tmp/m', exist_ok=True)\ngot = libc.mount(b'tmpfs', b'/tmp/m', b'tmpfs', 0, None) == 0"
    ),
    "binding": Attempt(
        WEAK, "os.makedirs('/tmp/b', exist_ok=True)\ngot = libc.mount(b'/usr', b'/tmp/b', None, 4096, None) == 0"
    ),
    "unmounting": Attempt(WEAK, "got = libc.umount2(b'/proc' if at['outside'] else b'/work', 2) == 0"),
    "another root": Attempt(WEAK, "got = libc.chroot(b'/tmp') == 0"),
    "files by handle": Attempt(
        ROOT,
        """
kept, mount = ctypes.create_string_buffer(136), ctypes.c_int()
kept[0:4] = (128).to_bytes(4, 'little')
folder = at['folder'] if at['outside'] else '/usr'
path = ctypes.create_string_buffer(folder.encode())
x86 = os.uname().machine == 'x86_64'
call(303 if x86 else 264, -100, ctypes.addressof(path), ctypes.addressof(kept), ctypes.addressof(mount), 0)
got = call(304 if x86 else 265, os.open(folder, os.O_RDONLY), ctypes.addressof(kept), os.O_RDONLY)[0] >= 0
""",
    ),
    "more processes": Attempt(
        ROOT, "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (1 << 30, 1 << 30))\ngot = True", perhaps=True
    ),
    "being preferred": Attempt(ROOT, "os.nice(-5)\ngot = True"),
    "typing into a terminal": Attempt(
        WEAK, "got = call(16 if os.uname().machine == 'x86_64' else 29, 1, 0x5412, -1)[1] != 'EPERM'"
    ),
    "a 32-bit call": Attempt(
        OUTSIDE,
        """
import mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex('b814000000cd80c3'))  # mov eax, 20 (getpid); int 0x80; ret
got = os.uname().machine == 'x86_64' and \
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))() > 0
""",
        perhaps=True,
    ),
    "a call by the x32 numbers": Attempt(
        OUTSIDE, "got = os.uname().machine != 'x86_64' or bool(call((1 << 30) + 39))", perhaps=True
    ),
}
ABSENT = {"create_module", "_sysctl", "uselib", "nfsservctl", "lookup_dcookie", "ustat", "sysfs"}
"""Calls that newer kernels have given up."""
OPTIONAL = {
    "memfd_secret",
    "userfaultfd",
    "bpf",
    "kexec_load",
    "kexec_file_load",
    "init_module",
    "finit_module",
    "delete_module",
    "acct",
    "quotactl",
}
OPTIONAL |= {
    "quotactl_fd",
    "fanotify_init",
    "mbind",
    "set_mempolicy",
    "set_mempolicy_home_node",
    "migrate_pages",
    "move_pages",
    "modify_ldt",
    "iopl",
}
OPTIONAL |= {
    "add_key",
    "request_key",
    "keyctl",
    "ioperm",
    "process_madvise",
    "syslog",
    "kcmp",
    "perf_event_open",
    "name_to_handle_at",
}
"""Calls that a kernel can be built without."""


def kernel() -> dict[str, Attempt]:
    """Each refused call, with arguments that make it fail: how it fails tells whether the kernel looked at them. Where
    there is no table for this processor, there is no sandbox either."""
    column = MACHINES[platform.machine()].column
    numbers = {
        name: both[column] for calls in REFUSED.values() for name, both in calls.items() if both[column] is not None
    }
    found = {}
    for name, number in numbers.items():
        arguments = "0, 0, 0" if name == "modify_ldt" else "-1, -1, -1, -1, -1, -1"
        code = f"result, error = call({number}, {arguments})\ngot = error != 'ENOSYS' and [result, error]"
        found[name] = Attempt(WEAK, code, perhaps=name in ABSENT | OPTIONAL)
    return found


FAMILIES = {"kernel": kernel(), "files": FILES, "processes": PROCESSES, "network": NETWORK, "privilege": PRIVILEGE}
