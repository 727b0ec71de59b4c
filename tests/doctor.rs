//! Tests `dayfly doctor` on this machine and on "other hosts", which are also this machine.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::harness::{Ground, text};
use serde_json::Value;

fn finding<'a>(report: &'a Value, what: &str) -> &'a Value {
    let findings = report["findings"].as_array().unwrap();
    findings
        .iter()
        .find(|finding| finding["what"].as_str().unwrap().starts_with(what))
        .unwrap_or_else(|| panic!("{what}: {report}"))
}

#[test]
fn each_finding_on_a_node_comes_with_advice_unless_it_is_ok() {
    let ground = Ground::new();
    let output = ground.output(&["doctor", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stdout));
    let reports: Value = serde_json::from_slice(&output.stdout).unwrap();
    for what in ["kernel", "open files", "shared memory", "data dir", "LD_PRELOAD", "RDMA", "locked memory", "FUSE", "time"] {
        let finding = finding(&reports[0], what);
        assert_eq!(finding["state"] == "ok", finding["advice"] == "", "{finding}");
    }
    let has_card = fs::read_dir("/sys/class/infiniband").is_ok_and(|mut cards| cards.next().is_some());
    let rdma = finding(&reports[0], "RDMA");
    // Any card here is Soft-RoCE, which works but is slow.
    assert_eq!(rdma["state"], if has_card { "slow" } else { "missing" }, "{rdma}");
    assert!(rdma["detail"].as_str().unwrap().contains(if has_card { "works" } else { "RDMA" }) || !has_card, "{rdma}");
    let table = ground.ok(&["doctor"]);
    assert!(table.contains("data dir") && table.contains("LD_PRELOAD"), "{table}");
    assert!(fs::read_dir(ground.data.path()).unwrap().next().is_none(), "nothing is left in the data dir");

    // If something that every session needs is missing, the exit status is 1.
    let output = ground.output(&["doctor", "--json", "--data-dir", "/absent"]);
    assert_eq!(output.status.code(), Some(1));
    let reports: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(finding(&reports[0], "data dir /absent")["state"], "missing");

    // So it is if the device that the user names is missing, and the devices that there are, are listed.
    let output = ground.output(&["doctor", "--json", "--rdma-device", "absent0"]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
    let reports: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rdma = finding(&reports[0], "RDMA");
    let advice = rdma["advice"].as_str().unwrap();
    assert_eq!(rdma["state"], "missing");
    assert!(advice.contains("--rdma-device"), "{rdma}");
    assert!(advice.contains(if has_card { "the RDMA devices rxe0" } else { "this node has no RDMA devices" }), "{rdma}");
}

#[test]
fn hosts_are_checked_and_each_pair_of_them_is_probed() {
    let ground = Ground::new();
    // A stand-in for ssh, which takes the same arguments and runs the program here.
    let shell = ground.at("shell");
    fs::write(
        &shell,
        "#!/bin/sh\nhost=$1; shift\ncase $host in broken*) echo 'no route to it' >&2; exit 255 ;; esac\n\
         [ \"$host\" != mute ] || exit 7\n[ \"$host\" != chatty ] || { printf 'Welcome \\377\\n'; exit 0; }\nexec \"$@\"\n",
    )
    .unwrap();
    fs::set_permissions(&shell, fs::Permissions::from_mode(0o755)).unwrap();
    let hosts = ["doctor", "--json", "--ssh", shell.to_str().unwrap(), "--hosts"];
    let output = ground.output(&[&hosts[..], &["localhost,127.0.0.1"]].concat());
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    let reports: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(reports.as_array().unwrap().len(), 3);
    assert_eq!(reports[1]["host"], "127.0.0.1");
    let between = reports[2]["findings"].as_array().unwrap();
    assert_eq!((between.len(), &between[0]["what"]), (2, &Value::from("localhost -> 127.0.0.1")));
    assert!(between[0]["state"] == "ok" && between[0]["detail"].as_str().unwrap().starts_with("TCP: "), "{between:?}");
    assert!(between[1]["detail"].as_str().unwrap().starts_with("RDMA: "), "{between:?}");

    let output = ground.output(&[&hosts[..], &["localhost,broken"]].concat());
    assert_eq!(output.status.code(), Some(1));
    let reports: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(finding(&reports[1], "dayfly")["detail"].as_str().unwrap().contains("on broken: no route to it"), "{reports}");

    let output = ground.output(&[&hosts[..], &["mute,chatty"]].concat());
    let reports: Value = serde_json::from_slice(&output.stdout).unwrap();
    let detail = |number: usize| finding(&reports[number], "dayfly")["detail"].as_str().unwrap();
    assert!(detail(0).contains("on mute: it ended without an answer (exit status: 7)"), "{reports}");
    assert!(detail(1).contains("on chatty: 'Welcome ") && detail(1).contains("is not an answer"), "{reports}");

    // A wrong list is refused, as `up` would refuse it, and no host is contacted.
    assert!(ground.fails(2, &[&hosts[..], &["n[1-"]].concat()).contains("is not a list of hosts"));
    assert!(ground.fails(2, &[&hosts[..], &[""]].concat()).contains("--hosts names no host"));
    let output = ground.output(&[&hosts[..], &["broken[1-2,4]"]].concat());
    let reports: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        reports.as_array().unwrap().iter().map(|report| &report["host"]).collect::<Vec<_>>(),
        ["broken1", "broken2", "broken4"]
    );
}
