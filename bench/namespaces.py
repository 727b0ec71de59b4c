#!/usr/bin/env python3
"""Runs a command in a session whose servers run in network namespaces of one machine, joined by a bridge.

usage: bench/namespaces.py [--nodes N] [--rate RATE] [--memory SIZE] [--capacity SIZE] [--up OPTION]... [--outside] DIR CMD...

Needs root and `dayfly` in PATH. DIR holds the runtime and data folders; its content is deleted first. CMD runs in the namespace of
node 0 as a process of node 0. DAYFLY_ADDRESS_K is set to the address of node K, and DAYFLY_PID_K to the process id of its server.
--rate limits the traffic to node 0; RATE is written as for `tc`, for example 400mbit. --up=OPTION is passed to `dayfly up`.
--outside runs CMD outside of all namespaces, so that it can take down the link of node K, vdfK, and read on any node.
"""

import argparse, os, shutil, subprocess, sys

BRIDGE = "dfbench"


def ip(*arguments, check=True):
    subprocess.run(["ip", *arguments], check=check, stderr=None if check else subprocess.DEVNULL)


def tear_down(nodes):
    for node in range(nodes):
        # A connection to a node that is cut off keeps the namespace, and its link, for minutes after its process has ended.
        ip("link", "del", f"vdf{node}", check=False)
        ip("netns", "del", f"df{node}", check=False)
    ip("link", "del", BRIDGE, check=False)


def set_up(nodes, rate):
    tear_down(nodes)
    ip("link", "add", BRIDGE, "type", "bridge")
    ip("link", "set", BRIDGE, "up")
    for node in range(nodes):
        name = f"df{node}"
        ip("netns", "add", name)
        ip("link", "add", f"v{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", f"v{name}", "master", BRIDGE, "up")
        for arguments in (["addr", "add", f"10.77.0.{node + 1}/24", "dev", "eth0"], ["link", "set", "eth0", "up"], ["link", "set", "lo", "up"]):
            ip("-n", name, *arguments)
    if rate:
        subprocess.run(["tc", "qdisc", "add", "dev", "vdf0", "root", "tbf", "rate", rate, "burst", "256k", "latency", "100ms"], check=True)


# A stand-in for `ssh OPTIONS HOST COMMAND` that runs the command in the namespace named HOST.
SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift 2; done
host=$1; shift
exec ip netns exec "$host" sh -c "$*"
"""


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rate")
    parser.add_argument("--memory", default="256MiB")
    parser.add_argument("--capacity", default="16GiB")
    parser.add_argument("--up", action="append", default=[])
    parser.add_argument("--outside", action="store_true")
    parser.add_argument("dir")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    shutil.rmtree(options.dir, ignore_errors=True)
    data, programs = os.path.join(options.dir, "data"), os.path.join(options.dir, "bin")
    os.makedirs(data)
    os.makedirs(programs)
    with open(os.path.join(programs, "ssh"), "w", opener=lambda path, flags: os.open(path, flags, 0o755)) as ssh:
        ssh.write(SSH)
    environment = dict(os.environ, DAYFLY_RUNTIME_DIR=options.dir)
    hosts = ",".join(f"df{node}" for node in range(options.nodes))
    up = ["dayfly", "up", "--foreground", "--hosts", hosts, "--memory", options.memory, "--capacity", options.capacity, "--data-dir", data, *options.up]
    session = None
    try:
        set_up(options.nodes, options.rate)
        path = programs + ":" + os.environ["PATH"]
        session = subprocess.Popen(["ip", "netns", "exec", "df0", *up], stdout=subprocess.PIPE, text=True, env=dict(environment, PATH=path))
        name = session.stdout.readline().strip()
        if not name:
            sys.exit(session.wait())
        folder = os.path.join(options.dir, f"dayfly-{os.geteuid()}", name)
        environment.update(DAYFLY_SESSION=name, DAYFLY_NODE="0")
        environment.update({f"DAYFLY_ADDRESS_{node}": f"10.77.0.{node + 1}" for node in range(options.nodes)})
        environment.update({f"DAYFLY_PID_{node}": open(os.path.join(folder, f"node-{node}.lock")).read() for node in range(options.nodes)})
        inside = [] if options.outside else ["ip", "netns", "exec", "df0"]
        return subprocess.run([*inside, *options.command], env=environment).returncode
    finally:
        if session:
            session.terminate()
            session.wait(timeout=30)
        tear_down(options.nodes)


sys.exit(main())
