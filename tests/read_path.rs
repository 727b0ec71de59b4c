//! Tests of the read path: batches, orders, joined fetches, waits for room in the arena, and leases of processes that are killed.

use std::collections::HashSet;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::harness::samples::{
    assert_accounts_are_settled, content, count, dataset, node, numbers, path, session, session_without_origins,
};
use crate::harness::{self, Cluster, Ground, wait_until};
use dayfly_client::{ClientError, Delivery, OnMissing, Samples, View};
use dayfly_meta::id::SampleId;
use dayfly_meta::limits::ARENA_LEN_MIN;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

const CHILD: &str = "DAYFLY_TEST_READ_PATH_CHILD";

/// Starts this test binary as a child process that runs `child_of_the_read_path` with these words as its instructions.
fn child(cluster: &Cluster, words: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "read_path::child_of_the_read_path", "--nocapture"])
        .env(CHILD, words)
        .env("DAYFLY_RUNTIME_DIR", cluster.runtime.path())
        .env("DAYFLY_SESSION", &cluster.id)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Does nothing, except in the processes that the other tests start.
#[test]
fn child_of_the_read_path() {
    let Ok(words) = std::env::var(CHILD) else { return };
    let words: Vec<&str> = words.split(' ').collect();
    let location = dayfly_client::locate::find(None).unwrap();
    let session = dayfly_client::Session::attach_to(&location, dayfly_meta::id::NodeId(words[1].parse().unwrap())).unwrap();
    let view = View::new(session);
    let number = |at: usize| words[at].parse::<usize>().unwrap();
    match words[0] {
        "read" => {
            let (file, len) = (number(2), number(3));
            let mut buffer = vec![0; len];
            // Wait, so that all readers begin at about the same time.
            while !std::path::Path::new(words[4]).exists() {
                std::thread::yield_now();
            }
            let opened = view.open(&path(file)).unwrap();
            assert_eq!(view.read_at(&opened, 0, &mut buffer).unwrap(), len);
            assert!(buffer == content(file, len));
        }
        "stress" => stress(&view, number(2), number(3) as u64, Duration::from_secs(number(4) as u64)),
        other => panic!("{other}"),
    }
}

/// Reads random files, one at a time and in batches, and checks every byte, until the time is up.
fn stress(view: &View, files: usize, seed: u64, duration: Duration) {
    let mut random = StdRng::seed_from_u64(seed);
    let dataset = dataset(view);
    let names = Samples::of(dataset.catalog());
    let until = Instant::now() + duration;
    let mut order = None;
    while Instant::now() < until {
        match random.random_range(0..4) {
            0 => {
                let number = random.random_range(0..files);
                let file = view.open(&path(number)).unwrap();
                let mut buffer = vec![0; file.stat().size as usize];
                let from = random.random_range(0..=buffer.len());
                let got = view.read_at(&file, from as u64, &mut buffer[from..]).unwrap();
                assert!(buffer[from..from + got] == content(number, buffer.len())[from..], "file {number} from {from}");
            }
            1 => {
                let epoch = random.random();
                let samples: Vec<SampleId> = names.epoch(seed, epoch).take(500).collect();
                order = Some(view.session().submit(&dataset, samples).unwrap());
            }
            _ => {
                let numbers: Vec<usize> = (0..random.random_range(1..200)).map(|_| random.random_range(0..files)).collect();
                let paths: Vec<Vec<u8>> = numbers.iter().map(|&number| path(number)).collect();
                let paths: Vec<&[u8]> = paths.iter().map(Vec::as_slice).collect();
                let delivery = if random.random() { Delivery::InOrder } else { Delivery::AsAvailable };
                let mut batch = view.read_many(&paths, delivery, OnMissing::Fail).unwrap();
                let mut seen = 0;
                while let Some(delivered) = batch.next() {
                    let delivered = delivered.unwrap();
                    let bytes = delivered.bytes.unwrap();
                    assert!(bytes == content(numbers[delivered.index], bytes.len()), "file {}", numbers[delivered.index]);
                    seen += 1;
                    if random.random_range(0..500) == 0 {
                        break;
                    }
                }
                assert!(seen > 0);
            }
        }
    }
    drop(order);
}

fn finish(child: Child) {
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}{}", harness::text(&output.stdout), harness::text(&output.stderr));
}

/// SEMANTICS: "A block that another node owns comes through the node's server, in chunks of at most 4
/// MiB, into the arena, which all processes of the node share. Requests for one chunk are joined:
/// sixteen processes cause one transfer. While the chunk is in the arena, processes find it without
/// asking the server."
#[test]
fn sixteen_processes_that_want_one_block_cause_one_transfer() {
    let lens: Vec<usize> = (0..40).map(|number| 3_500_000 + number).collect();
    let cluster = session(3, &[], &lens);
    let view = cluster.view(0);
    let far = numbers(&view, lens.len(), false);
    let before = count(&node(&cluster, 0)["remote_reads"]);
    for &file in &far[..3] {
        let go = cluster.at(format!("go-{file}"));
        let words = format!("read 0 {file} {} {}", lens[file], go.display());
        let readers: Vec<Child> = (0..16).map(|_| child(&cluster, &words)).collect();
        std::thread::sleep(Duration::from_millis(300));
        fs::write(&go, "").unwrap();
        readers.into_iter().for_each(finish);
    }
    assert_eq!(count(&node(&cluster, 0)["remote_reads"]) - before, 3);
    assert_accounts_are_settled(&cluster);
    cluster.down();
}

/// SEMANTICS: "Many samples at once: `read_many` in Rust takes samples or paths; C has
/// `dayfly_read_many` and `dayfly_batch_*`. Blocks that the node holds are used in place; the others
/// take one message to the server and one to each owner. Samples are delivered in the order requested,
/// or as they arrive."
#[test]
fn a_batch_is_delivered_in_the_order_requested_or_as_samples_arrive() {
    let lens: Vec<usize> = (0..400).map(|number| number * number % 9001).chain([5 << 20, 9 << 20]).collect();
    let cluster = session(3, &["--verify-reads"], &lens);
    cluster.ok(&["tune", "--cache", "off"]);
    let view = cluster.view(1);
    let mut wanted: Vec<usize> = (0..lens.len()).chain([7, 7, 399]).collect();
    wanted.shuffle(&mut StdRng::seed_from_u64(3));
    let paths: Vec<Vec<u8>> = wanted.iter().map(|&number| path(number)).collect();
    let paths: Vec<&[u8]> = paths.iter().map(Vec::as_slice).collect();
    for delivery in [Delivery::InOrder, Delivery::AsAvailable] {
        let mut batch = view.read_many(&paths, delivery, OnMissing::Fail).unwrap();
        assert!((0..wanted.len()).all(|index| batch.get(index).is_none()), "nothing was delivered, or verified, yet");
        let mut seen = Vec::new();
        while let Some(delivered) = batch.next() {
            let delivered = delivered.unwrap();
            let number = wanted[delivered.index];
            assert!(delivered.bytes.unwrap() == content(number, lens[number]), "{number}");
            seen.push(delivered.index);
        }
        // Until the batch ends, its samples can be read again.
        assert!(wanted.iter().enumerate().all(|(index, &number)| batch.get(index).unwrap() == content(number, lens[number])));
        assert!(batch.is_good() && batch.get(wanted.len()).is_none());
        let in_order = seen.is_sorted();
        assert_eq!(in_order, delivery == Delivery::InOrder, "this node's samples come first unless an order was requested");
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..wanted.len()), "each sample comes once");
    }
    // Read into buffers. A buffer that is too short gets as many bytes as it can hold.
    let mut room: Vec<Vec<u8>> = wanted.iter().map(|&number| vec![1; if number == 398 { 5 } else { lens[number] }]).collect();
    let mut buffers: Vec<&mut [u8]> = room.iter_mut().map(Vec::as_mut_slice).collect();
    let sizes = view.read_many_into(&paths, &mut buffers, OnMissing::Fail).unwrap();
    for ((&number, size), bytes) in wanted.iter().zip(sizes).zip(room) {
        assert!(size.unwrap() == lens[number] as u64 && bytes == content(number, lens[number])[..bytes.len()], "{number}");
    }
    // Without buffers only the sizes are returned; file 0 is empty.
    let sizes = view.read_many_into(&[&path(0), &path(5)], &mut [], OnMissing::Fail).unwrap();
    assert_eq!(sizes.into_iter().map(Result::unwrap).collect::<Vec<_>>(), [0, lens[5] as u64]);
    assert_accounts_are_settled(&cluster);
    cluster.down();
}

/// Reads samples into buffers, and checks all bytes.
fn check_into_buffers(view: &View, numbers: &[usize], lens: &[usize]) {
    let samples: Vec<SampleId> = numbers.iter().map(|&number| view.open(&path(number)).unwrap().sample()).collect();
    let mut room: Vec<Vec<u8>> = numbers.iter().map(|&number| vec![1; lens[number]]).collect();
    let mut buffers: Vec<&mut [u8]> = room.iter_mut().map(Vec::as_mut_slice).collect();
    let sizes = view.session().read_many_into(&dataset(view), &samples, &mut buffers, OnMissing::Fail).unwrap();
    for ((&number, size), bytes) in numbers.iter().zip(sizes).zip(room) {
        assert!(size.unwrap() == lens[number] as u64 && bytes == content(number, lens[number]), "{number}");
    }
}

/// SEMANTICS: "`read_many_into` in Rust, and `dayfly_read_many` and `dayfly_read_many_ids` in C, copy samples that
/// lie on the node or in the arena straight into the caller's buffers, without a message and without a
/// lease. If a sample makes way while it is copied, it is read again."
#[test]
fn samples_of_this_node_are_read_into_buffers_while_the_server_answers_nobody() {
    let lens: Vec<usize> = (0..120).map(|number| number * 911).chain([5 << 20; 4]).collect();
    for options in [&[][..], &["--verify-reads"]] {
        let cluster = session(2, options, &lens);
        cluster.ok(&["tune", "--cache", "off"]);
        let view = cluster.view(0);
        let here = numbers(&view, lens.len(), true);
        // One sample of the other node comes into the arena.
        let far = numbers(&view, lens.len(), false).into_iter().find(|&number| (1..120).contains(&number)).unwrap();
        check_into_buffers(&view, &[far], &lens);
        let asked = |at: &str| count(&node(&cluster, 0)["reads"][at]["count"]);
        let before = asked("asked");
        harness::signal(cluster.pids()[&0], nix::sys::signal::Signal::SIGSTOP);
        let start = Instant::now();
        for _ in 0..3 {
            check_into_buffers(&view, &here.iter().copied().chain([far]).collect::<Vec<_>>(), &lens);
        }
        harness::assert_within(Duration::from_secs(4), start);
        harness::signal(cluster.pids()[&0], nix::sys::signal::Signal::SIGCONT);
        assert_eq!(asked("asked"), before);
        assert_accounts_are_settled(&cluster);
        cluster.down();
    }
}

/// SEMANTICS: "`read_many_into` in Rust, and `dayfly_read_many` and `dayfly_read_many_ids` in C, copy samples that
/// lie on the node or in the arena straight into the caller's buffers, without a message and without a
/// lease. If a sample makes way while it is copied, it is read again."
#[test]
fn samples_that_make_way_while_they_are_copied_are_read_again() {
    let lens: Vec<usize> = (0..150).map(|number| 2000 + number * 997).collect();
    let cluster = session(2, &["--memory", &ARENA_LEN_MIN.to_string()], &lens);
    let all: Vec<usize> = (0..lens.len()).collect();
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let view = cluster.view(0);
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    check_into_buffers(&view, &all, &lens);
                }
            });
        }
        let view = cluster.view(0);
        for _ in 0..2 {
            cluster.ok(&["tune", "--cache", "all"]);
            let deadline = Instant::now() + Duration::from_secs(8);
            while !numbers(&view, lens.len(), false).is_empty() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(20));
            }
            cluster.ok(&["tune", "--cache", "off"]);
        }
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert_accounts_are_settled(&cluster);
    cluster.down();
}

/// SEMANTICS: "A sample that cannot be read ends the batch, or is reported individually, as the caller
/// chooses."
#[test]
fn a_missing_sample_ends_the_batch_or_is_reported() {
    let cluster = session(2, &[], &[100; 60]);
    let view = cluster.view(0);
    let names: Vec<Vec<u8>> =
        (0..50).map(path).chain([b"/dayfly/d/none".to_vec(), b"/dayfly/d".to_vec()]).chain((50..60).map(path)).collect();
    let names: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
    let mut batch = view.read_many(&names, Delivery::InOrder, OnMissing::Fail).unwrap();
    let failed = std::iter::from_fn(|| batch.next().map(|delivered| delivered.err())).flatten().next().unwrap();
    assert!(matches!(&failed, ClientError::Path { path, errno, .. } if path == "/dayfly/d/none" && *errno == nix::libc::ENOENT));
    assert!(batch.next().is_none(), "the batch has ended");
    drop(batch);
    let mut batch = view.read_many(&names, Delivery::AsAvailable, OnMissing::Report).unwrap();
    let (mut whole, mut missing) = (0, Vec::new());
    while let Some(delivered) = batch.next() {
        let delivered = delivered.unwrap();
        match delivered.bytes {
            Ok(bytes) => whole += usize::from(bytes.len() == 100),
            Err(_) => missing.push(delivered.index),
        }
    }
    drop(batch);
    assert_eq!((whole, missing), (60, vec![50, 51]));
    let mut room = vec![vec![0; 100]; names.len()];
    let mut buffers: Vec<&mut [u8]> = room.iter_mut().map(Vec::as_mut_slice).collect();
    assert!(view.read_many_into(&names, &mut buffers, OnMissing::Fail).is_err());
    let sizes = view.read_many_into(&names, &mut buffers, OnMissing::Report).unwrap();
    assert_eq!(sizes.iter().filter(|size| size.is_err()).count(), 2);
}

/// SEMANTICS: "A sample that cannot be read ends the batch, or is reported individually, as the caller
/// chooses."
#[test]
fn samples_that_only_a_dead_node_has_are_reported() {
    let cluster = session_without_origins(2, &[], &[100; 60]);
    let view = cluster.view(0);
    let far: HashSet<SampleId> =
        numbers(&view, 60, false).into_iter().map(|number| view.open(&path(number)).unwrap().sample()).collect();
    cluster.kill(1);
    let samples: Vec<SampleId> = (0..60).map(SampleId).collect();
    let mut batch = view.session().read_many(&dataset(&view), &samples, Delivery::AsAvailable, OnMissing::Report).unwrap();
    let mut errors = HashSet::new();
    while let Some(delivered) = batch.next() {
        let delivered = delivered.unwrap();
        if let Err(error) = delivered.bytes {
            assert!(error.to_string().contains("node 1"), "{error}");
            errors.insert(samples[delivered.index]);
        }
    }
    assert_eq!(errors, far);
    drop(batch);
    let mut batch = view.session().read_many(&dataset(&view), &samples, Delivery::InOrder, OnMissing::Fail).unwrap();
    assert!(batch.wait().unwrap_err().to_string().contains("node 1"));
}

/// SEMANTICS: "While the arena is full of leased chunks, requests wait for at most 15 s, first come, first served. A batch that
/// is larger than the arena comes in parts."
/// SEMANTICS: "A batch gets all of its parts."
#[test]
fn batches_larger_than_the_arena_are_served_in_parts_and_nobody_starves() {
    let memory = ARENA_LEN_MIN.to_string();
    let lens: Vec<usize> = (0..120).map(|number| 1_000_000 + number * 1000).chain([70 << 20]).collect();
    let cluster = session(2, &["--memory", &memory], &lens);
    cluster.ok(&["tune", "--cache", "off"]);
    // Four threads read batches of all samples, and this one reads file after file, all at the same time. The arena is far smaller
    // than one batch.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let view = cluster.view(0);
                let samples: Vec<SampleId> = (0..lens.len() as u32).map(SampleId).collect();
                let dataset = dataset(&view);
                let sizes: u64 = samples.iter().map(|&sample| dataset.catalog().sample(sample).unwrap().0).sum();
                for _ in 0..2 {
                    let mut batch = view.session().read_many(&dataset, &samples, Delivery::InOrder, OnMissing::Fail).unwrap();
                    batch.wait().unwrap();
                    let all: u64 = (0..samples.len()).map(|index| batch.get(index).unwrap().len() as u64).sum();
                    assert_eq!(all, sizes);
                }
            });
        }
        let view = cluster.view(0);
        let mut longest = Duration::ZERO;
        for (number, &len) in lens.iter().enumerate() {
            let start = Instant::now();
            let file = view.open(&path(number)).unwrap();
            let mut buffer = vec![0; len];
            assert_eq!(view.read_at(&file, 0, &mut buffer).unwrap(), len);
            assert!(buffer == content(number, len), "{number}");
            longest = longest.max(start.elapsed());
        }
        assert!(longest < Duration::from_secs(12), "{longest:?}: no wait for room may come near its deadline");
    });
    assert_accounts_are_settled(&cluster);
    cluster.down();
}

/// SEMANTICS: "Rather than wait for room that other batches hold, it releases its own leases and keeps
/// copies, so that batches never wait for each other."
#[test]
fn batches_that_each_hold_a_part_do_not_wait_for_each_other() {
    let memory = ARENA_LEN_MIN.to_string();
    let lens = vec![100_000; 1200];
    let cluster = session(3, &["--memory", &memory], &lens);
    cluster.ok(&["tune", "--cache", "off"]);
    let all_hold = std::sync::Barrier::new(6);
    std::thread::scope(|scope| {
        for reader in 0..6_u32 {
            let (cluster, all_hold) = (&cluster, &all_hold);
            scope.spawn(move || {
                let view = cluster.view(0);
                let samples: Vec<SampleId> = (reader * 200..reader * 200 + 200).map(SampleId).collect();
                let mut batch =
                    view.session().read_many(&dataset(&view), &samples, Delivery::AsAvailable, OnMissing::Fail).unwrap();
                all_hold.wait();
                std::thread::sleep(Duration::from_millis(300));
                let start = Instant::now();
                batch.wait().unwrap();
                harness::assert_no_hang(start);
            });
        }
    });
    assert_accounts_are_settled(&cluster);
    cluster.down();
}

/// SEMANTICS: "A batch ends when its session ends."
#[test]
fn a_batch_under_way_ends_when_the_session_does() {
    let cluster = session(2, &[], &[20_000; 3000]);
    cluster.ok(&["tune", "--cache", "off"]);
    let view = cluster.view(0);
    let samples: Vec<SampleId> = (0..3000).map(SampleId).collect();
    let mut batch = view.session().read_many(&dataset(&view), &samples, Delivery::InOrder, OnMissing::Report).unwrap();
    drop(batch.next());
    cluster.ok(&["down"]);
    let start = Instant::now();
    while let Some(delivered) = batch.next() {
        if delivered.is_err() {
            break;
        }
    }
    assert!(!batch.is_good());
    harness::assert_no_hang(start);
}

/// SEMANTICS: "A batch or an order belongs to the process that made it. A forked child's use of its
/// copy does not affect the parent."
#[test]
fn a_forked_childs_use_of_its_copies_does_not_affect_its_parent() {
    let ground = Ground::new();
    fs::create_dir(ground.at("d")).unwrap();
    (0..120_usize).for_each(|number| fs::write(ground.at(format!("d/{number}")), vec![(number % 251) as u8; 200_000]).unwrap());
    let cluster = ground.up_with(2, &["--memory", &ARENA_LEN_MIN.to_string()]);
    cluster.stage(&[&cluster.at("d")], "/dayfly/d");
    cluster.ok(&["tune", "--cache", "off"]);
    let far = numbers(&cluster.view(0), 120, false);
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/posix/fork_batch.py");
    let mut command = cluster.dayfly();
    command.args(["exec", "--node", "0", "--", "python3"]).arg(script);
    command.args(far.iter().map(|&number| String::from_utf8(path(number)).unwrap()));
    let mut parent = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(parent.stdout.as_mut().unwrap()), &mut line).unwrap();
    if line.trim() == "ended" {
        // The child still has everything open.
        wait_until("the order has ended", || node(&cluster, 0)["prefetch"]["orders"] == 0);
        assert_accounts_are_settled(&cluster);
    }
    let output = parent.wait_with_output().unwrap();
    assert!(output.status.success() && line.trim() == "ended", "{}", harness::text(&output.stderr));
    cluster.down();
}

/// SEMANTICS: "The server revokes the leases of a process that has exited, however it exited."
#[test]
fn leases_end_with_their_process_even_if_a_child_inherited_its_connections() {
    let cluster = session(2, &[], &[200_000; 60]);
    cluster.ok(&["tune", "--cache", "off"]);
    let far = numbers(&cluster.view(0), 60, false);
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/posix/hold.py");
    let mut command = cluster.dayfly();
    command.args(["exec", "--node", "0", "--", "python3"]).arg(script);
    command.args(far.iter().map(|&number| String::from_utf8(path(number)).unwrap()));
    let mut holder = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(holder.stdout.take().unwrap()), &mut line).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!((words[0], words[1].parse().unwrap_or(0)), ("held", 200_000 * far.len()));
    assert!(count(&node(&cluster, 0)["leases"]) >= far.len() as u64);
    holder.kill().unwrap();
    assert_eq!(holder.wait().unwrap().signal(), Some(9));
    assert_accounts_are_settled(&cluster);
    // The child is still alive, and has everything open that its parent had open.
    harness::signal(words[2].parse().unwrap(), nix::sys::signal::Signal::SIGKILL);
    cluster.down();
}

/// SEMANTICS: "The server revokes the leases of a process that has exited, however it exited."
#[test]
fn clients_killed_at_random_leave_no_lease_and_see_no_wrong_byte() {
    let seconds = std::env::var("DAYFLY_TEST_STRESS_SECONDS").map_or(4, |seconds| seconds.parse().unwrap());
    let lens: Vec<usize> = (0..600).map(|number| 10 + number * number * 7 % 90_000).chain([6 << 20; 4]).collect();
    let memory = (4 * ARENA_LEN_MIN).to_string();
    let cluster = session(3, &["--memory", &memory], &lens);
    let mut random = StdRng::seed_from_u64(11);
    let start = |cluster: &Cluster, seed: u64| {
        let node = seed % 3;
        child(cluster, &format!("stress {node} {} {seed} {}", lens.len(), seconds + 60))
    };
    let mut clients: Vec<Child> = (0..8).map(|seed| start(&cluster, seed)).collect();
    let until = Instant::now() + Duration::from_secs(seconds);
    let mut seed = 8;
    while Instant::now() < until {
        std::thread::sleep(Duration::from_millis(random.random_range(20..300)));
        let which = random.random_range(0..clients.len());
        if random.random_range(0..10) == 0 {
            // Cached blocks come and go while the clients read.
            cluster.ok(&["tune", "--cache", ["off", "all", "2MiB"][which % 3]]);
        }
        let killed = std::mem::replace(&mut clients[which], start(&cluster, seed));
        seed += 1;
        end(killed);
    }
    clients.into_iter().for_each(end);
    println!("{seed} clients were killed");
    assert_accounts_are_settled(&cluster);
    cluster.ok(&["verify", "--from-every-node"]);
    cluster.down();
}

/// Kills a client, which must still be alive.
fn end(mut client: Child) {
    if client.try_wait().unwrap().is_some() {
        let output = client.wait_with_output().unwrap();
        panic!("a client exited by itself: {}{}", harness::text(&output.stdout), harness::text(&output.stderr));
    }
    client.kill().unwrap();
    client.wait().unwrap();
}
