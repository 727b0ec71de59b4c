#!/usr/bin/env python3
"""Runs a command in a session whose servers each have a network of their own: namespaces joined by a bridge, on one machine.

usage: bench/namespaces.py [--nodes N] [--rate RATE] [--memory SIZE] [--capacity SIZE] DIR CMD...

As root, with `dayfly` in PATH. DIR is for runtime and data folders, and is emptied. CMD runs in node 0's namespace as a process of
node 0, with DAYFLY_ADDRESS_K set to each node's address. --rate throttles what goes to node 0 (as `tc` writes it: 400mbit).
"""

import argparse, json, os, secrets, shutil, subprocess, sys

BRIDGE = "dfbench"


def ip(*arguments, check=True):
    subprocess.run(["ip", *arguments], check=check, stderr=None if check else subprocess.DEVNULL)


def tear_down(nodes):
    for node in range(nodes):
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


def size(text):
    units = {"KiB": 10, "MiB": 20, "GiB": 30}
    return int(text[:-3]) << units[text[-3:]] if text[-3:] in units else int(text)


def start(node, folder, session, key, options):
    data = os.path.join(options.dir, "data", f"dayfly-{session}-{node}")
    orders = {
        "session": session, "key": list(key), "node": node, "listen": f"10.77.0.{node + 1}:0", "folder": folder, "data_dirs": [data],
        "capacity": size(options.capacity), "memory": size(options.memory), "prefix": list(b"/dayfly"), "verify_reads": False,
        "workers": 1, "decoders": 1, "stage_memory": 1 << 30, "is_tethered": True,
    }
    log = open(os.path.join(folder, f"node-{node}.log"), "ab")
    server = subprocess.Popen(["ip", "netns", "exec", f"df{node}", "dayfly", "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd="/")
    print(json.dumps(orders), file=server.stdin, flush=True)
    return server


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rate")
    parser.add_argument("--memory", default="256MiB")
    parser.add_argument("--capacity", default="16GiB")
    parser.add_argument("dir")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    shutil.rmtree(options.dir, ignore_errors=True)
    session, key = secrets.token_hex(8), secrets.token_bytes(32)
    folder = os.path.join(options.dir, f"dayfly-{os.geteuid()}", session)
    os.makedirs(folder, mode=0o700)
    os.chmod(os.path.dirname(folder), 0o700)
    os.makedirs(os.path.join(options.dir, "data"))
    servers = []
    try:
        set_up(options.nodes, options.rate)
        servers = [start(node, folder, session, key, options) for node in range(options.nodes)]
        addresses = [json.loads(server.stdout.readline())["address"] for server in servers]
        for server in servers:
            print(json.dumps({"addresses": addresses}), file=server.stdin, flush=True)
        for node, server in enumerate(servers):
            if server.stdout.readline().strip() != "ready":
                sys.exit(open(os.path.join(folder, f"node-{node}.log")).read())
        environment = dict(os.environ, DAYFLY_RUNTIME_DIR=options.dir, DAYFLY_SESSION=session, DAYFLY_NODE="0")
        environment.update({f"DAYFLY_ADDRESS_{node}": f"10.77.0.{node + 1}" for node in range(options.nodes)})
        environment.update({f"DAYFLY_PID_{node}": open(os.path.join(folder, f"node-{node}.lock")).read() for node in range(options.nodes)})
        return subprocess.run(["ip", "netns", "exec", "df0", *options.command], env=environment).returncode
    finally:
        for server in servers:
            server.stdin.close()
        for server in servers:
            server.wait(timeout=30)
        tear_down(options.nodes)


sys.exit(main())
