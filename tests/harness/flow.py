"""Makes one TCP connection between two servers dead: nothing sent to the dialing end arrives, acknowledgments included.

Usage: flow.py PID PORT NUMBER. Takes one of the connections that process PID has dialed to PORT: the one with index NUMBER, in
the order of the descriptors. Attaches a socket filter, which drops everything, to a copy of the descriptor. Neither end notices
this.
"""

import ctypes
import os
import socket
import struct
import sys

PIDFD_GETFD = 438
SO_ATTACH_FILTER = 26
RETURN = 0x06

pid, port, number = (int(argument) for argument in sys.argv[1:4])
libc = ctypes.CDLL(None, use_errno=True)
pidfd = os.pidfd_open(pid)
flows = []
for name in sorted(os.listdir(f"/proc/{pid}/fd"), key=int):
    if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
        continue
    copy = libc.syscall(PIDFD_GETFD, pidfd, int(name), 0)
    if copy < 0:
        sys.exit(f"cannot take descriptor {name}: {os.strerror(ctypes.get_errno())}")
    flow = socket.socket(fileno=copy)
    try:
        if flow.family == socket.AF_INET and flow.getpeername()[1] == port:
            flows.append(flow)
    except OSError:
        pass  # It is a listener, or it is no longer connected.
if len(flows) != 3:
    sys.exit(f"{len(flows)} connections instead of 3")
drop_all = ctypes.create_string_buffer(struct.pack("HBBI", RETURN, 0, 0, 0))
program = struct.pack("HP", 1, ctypes.addressof(drop_all))
flows[number].setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
