//! Copies of blocks on servers that have replaced others.

use super::*;

/// Returns the bytes of the blocks that are on a node's drive, whichever way they came there.
fn bytes_on(cluster: &Cluster, node: u16) -> u64 {
    let status = node_status(cluster, node);
    let bytes = [&status["held_bytes"], &status["copies"]["bytes"], &status["cached_bytes"]];
    bytes.iter().map(|bytes| bytes.as_u64().unwrap_or(0)).sum()
}

/// Starts a session that replaces dead servers, stages in an archive with copies, and removes the archive.
fn session_with_copies(archive: &str, copies: &str, options: &[&str]) -> Cluster {
    let cluster = ground().up_rejoining(NODES, &[&QUICK, options].concat());
    pack(&cluster.at(archive), &cluster.at("tree"), &[]);
    cluster.ok(&["stage-in", "--copies", copies, cluster.at(archive).to_str().unwrap(), "/dayfly/d"]);
    fs::remove_file(cluster.at(archive)).unwrap();
    cluster
}

/// SEMANTICS: "With copies, a new server gets its blocks from the nodes that hold copies."
#[test]
fn copies_are_made_again_on_a_new_server() {
    let cluster = session_with_copies("a.tar.gz", "2", &[]);
    let before = bytes_on(&cluster, 3);
    replace(&cluster, 3);
    wait_until("its blocks have come back", || bytes_on(&cluster, 3) >= before);
    // Now another node may be lost.
    replace(&cluster, 2);
    (0..NODES).for_each(|node| read_all(&cluster.view(node), "d", &format!("on node {node}")));
    cluster.down();
}

/// SEMANTICS: "A new server that does not have a block back yet is not the last resort: the other holders are asked."
#[test]
fn two_new_servers_get_the_blocks_that_both_held_from_the_third_holder() {
    for archive in ["b.tar", "a.tar.gz"] {
        let cluster = session_with_copies(archive, "3", &[]);
        let staged: Vec<u64> = (0..NODES).map(|node| bytes_on(&cluster, node)).collect();
        for lost in [[0, 2], [1, 3]] {
            let old = lost.map(|node| (node, cluster.pids()[&node]));
            old.iter().for_each(|(_, pid)| signal(*pid, Signal::SIGKILL));
            old.iter().for_each(|(node, pid)| wait_until_replaced(&cluster, *node, *pid));
            let is_back = |node: u16| bytes_on(&cluster, node) >= staged[usize::from(node)];
            wait_until("their blocks have come back", || lost.into_iter().all(is_back));
            lost.into_iter().for_each(|node| assert_eq!(node_status(&cluster, node)["origins"]["reads"], 0, "{archive}"));
        }
        (0..NODES).for_each(|node| read_all(&cluster.view(node), "d", &format!("of {archive} on node {node}")));
        cluster.down();
    }
}

/// SEMANTICS: "A minute after that node is a member again with all its copies, these are ordinary cached blocks."
/// SEMANTICS: "This holds for one loss after another, down to the last server, if the copies were made again in between."
#[test]
fn copies_on_other_nodes_stay_until_new_servers_have_them_and_new_servers_make_copies_in_place_of_others() {
    // So slow that the new servers do not have their copies back before the cache is turned off.
    let options = [&QUICK[..], &["--no-rejoin", "--recovery-rate", "1MiB", "--recovery-timeout", "0"]].concat();
    let (ground, count, len) = (ground(), 600, 30_000);
    fs::create_dir(ground.at("more")).unwrap();
    (0..count).for_each(|number| fs::write(ground.at(format!("more/{number}")), content(number, len)).unwrap());
    let cluster = ground.up_rejoining(NODES, &options);
    cluster.ok(&["stage-in", "--copies", "2", cluster.at("more").to_str().unwrap(), "/dayfly/d"]);
    fs::rename(cluster.at("more"), cluster.at("away")).unwrap();
    let staged: Vec<u64> = (0..NODES).map(|node| bytes_on(&cluster, node)).collect();
    let lose = |lost: u16, left: &[u16]| {
        cluster.kill(lost);
        wait_until("it is lost", || is_lost(&cluster, lost));
        let is_recovered = |node: u16| {
            let recovery = &state_on(&cluster, left[0], node)["recovery"];
            recovery["is_scanned"] == true && recovery["wanted"] == recovery["recovered"]
        };
        wait_until("its copies are made again", || left.iter().all(|&node| is_recovered(node)));
    };
    let read_all = |nodes: &[u16]| {
        for &node in nodes {
            let view = cluster.view(node);
            for number in 0..count {
                let file = view.open(&path(number)).unwrap();
                let mut bytes = vec![0; len];
                view.read_at(&file, 0, &mut bytes).unwrap_or_else(|error| panic!("{number} on node {node}: {error}"));
                assert!(bytes == content(number, len), "{number} on node {node}");
            }
        }
    };
    lose(1, &[0, 3]);
    lose(2, &[0, 3]);
    // With the other holders of their blocks lost, the new servers depend on what the others hold in their place.
    let (succeeded, message) = rejoin(&cluster, &[]);
    assert!(succeeded, "{message}");
    let is_back = |node: u16| bytes_on(&cluster, node) >= staged[usize::from(node)];
    assert!(!is_back(1) && !is_back(2), "their copies are back too early for this test");
    cluster.ok(&["tune", "--cache", "off"]);
    wait_until("their copies are back", || is_back(1) && is_back(2));
    read_all(&[0, 1, 2, 3]);
    lose(3, &[0, 1, 2]);
    cluster.kill(0);
    read_all(&[1, 2]);
    cluster.down();
}

/// SEMANTICS: "Copies are never evicted. This also holds for those that a new server has got back"
#[test]
fn copies_that_came_back_make_way_for_nothing() {
    let cluster = session_with_copies("a.tar.gz", "2", &["--capacity", "32MiB"]);
    let before = bytes_on(&cluster, 3);
    let free = node_status(&cluster, 3)["free_bytes"].as_u64().unwrap();
    replace(&cluster, 3);
    wait_until("its blocks have come back", || bytes_on(&cluster, 3) >= before);
    let free_now = node_status(&cluster, 3)["free_bytes"].as_u64().unwrap();
    assert!(free_now <= free + (1 << 20), "{free_now} bytes are free, and {free} were before");
    cluster.ok(&["tune", "--cache", "off"]);
    assert!(bytes_on(&cluster, 3) >= before, "copies made way for `tune`");
    cluster.ok(&["tune", "--cache", "all"]);
    // The last ones find no room, or are stored in part.
    let succeeded: Vec<bool> = (0..12)
        .map(|number| {
            cluster.output(&["stage-in", cluster.at("tree").to_str().unwrap(), &format!("/dayfly/t{number}")]).status.success()
        })
        .collect();
    assert!(succeeded[0], "one fits");
    // Stored bytes of these datasets count, too, so the copies show only after another loss.
    replace(&cluster, 2);
    (0..NODES).for_each(|node| read_all(&cluster.view(node), "d", &format!("on node {node}")));
    cluster.down();
}

/// SEMANTICS: "If a node is lost before its samples of compressed archives have been copied, the stage-in begins again. Otherwise it
/// goes on, and the summary says how many bytes of copies are missing. They are made afterwards, also by the lost node if it returns."
#[test]
fn a_stage_in_that_loses_a_node_while_it_reads_has_all_copies_in_the_end() {
    let cluster = ground().up_rejoining(NODES, &QUICK);
    // What is only cached makes way, and what is a copy does not.
    cluster.ok(&["tune", "--cache", "off"]);
    let source = cluster.at("a.tar");
    let mut staging = cluster.dayfly();
    staging.args(["stage-in", "--json", "--copies", "2", "--max-rate", "1MB"]).arg(&source).arg("/dayfly/d");
    let mut staging = staging.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(staging.stdout.take().unwrap()).lines();
    let mut events = lines.map(|line| serde_json::from_str::<serde_json::Value>(&line.unwrap()).unwrap());
    // By now, node 1 has blocks, and the archive is read for as long as it takes to notice that the node is lost. Later, the stage-in
    // would begin again.
    events.find(|event| event["event"] == "progress" && event["bytes"].as_u64() > Some(1_500_000)).expect("it makes progress");
    replace(&cluster, 1);
    let summary = events.last().unwrap();
    assert!(staging.wait().unwrap().success() && summary["uncopied_bytes"].as_u64() > Some(0), "{summary}");
    let is_recovered = |node| {
        let recovery = &node_status(&cluster, node)["recovery"];
        recovery["is_scanned"] == true && recovery["wanted"] == recovery["recovered"]
    };
    let total = 2 * summary["bytes"].as_u64().unwrap();
    let has_come_back = || (0..NODES).all(is_recovered) && (0..NODES).map(|node| bytes_on(&cluster, node)).sum::<u64>() >= total;
    wait_until("all copies are made", has_come_back);
    fs::rename(&source, source.with_extension("away")).unwrap();
    replace(&cluster, 0);
    (0..NODES).for_each(|node| read_all(&cluster.view(node), "d", &format!("on node {node}")));
    cluster.down();
}
