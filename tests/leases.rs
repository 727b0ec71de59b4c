//! Tests of the leases of readers that stop, sleep or keep their views, and tests of requests that wait for the room that these
//! readers hold.

use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::harness::alone::runs_alone_with_views;
use crate::harness::samples::{assert_accounts_are_settled, content, dataset, numbers, path, session};
use crate::harness::{self, Cluster, Ground, signal, wait_until};
use dayfly_client::{ClientError, Delivered, Delivery, OnMissing, View, ViewError};
use dayfly_meta::chunk::Chunk;
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{BlockId, NodeId, SampleId};
use dayfly_meta::limits::ARENA_LEN_MIN;
use dayfly_meta::wire::frame::{LOCAL_HEADER_LEN, decode_local, encode_local};
use dayfly_meta::wire::local::{FromClient, FromServer};
use dayfly_meta::wire::{VERSION, decode, encode};
use nix::sys::signal::Signal;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const CHILD: &str = "DAYFLY_TEST_LEASES_CHILD";

const SMALL: usize = 600;
const LARGE: usize = 800;
const LARGE_LEN: usize = 150_000;

fn len(number: usize) -> usize {
    if number < SMALL { 2000 + number } else { LARGE_LEN }
}

/// A session of three nodes with the smallest arena, and files below a path so long that a few hundred errors fill a socket.
/// Only the owner of a block can serve the block.
fn cluster_of_long_names() -> (Cluster, String) {
    let ground = Ground::new();
    fs::create_dir(ground.at("d")).unwrap();
    (0..SMALL + LARGE).for_each(|number| fs::write(ground.at(format!("d/{number}")), content(number, len(number))).unwrap());
    let cluster = ground.up_with(3, &["--memory", &ARENA_LEN_MIN.to_string()]);
    let target = format!("/dayfly{}", format!("/{}", "n".repeat(250)).repeat(8));
    cluster.stage_compressed("d", &target);
    cluster.ok(&["tune", "--cache", "off"]);
    (cluster, target)
}

/// Returns the numbers and samples of the files in `range` that a node owns.
fn owned_by(view: &View, target: &str, range: std::ops::Range<usize>, owner: u16) -> Vec<(usize, SampleId)> {
    let dataset = dataset(view);
    let sample = |number: usize| view.open(format!("{target}/{number}").as_bytes()).unwrap().sample();
    let is_owned = |sample: SampleId| {
        let (_, blocks) = dataset.catalog().sample(sample).unwrap();
        dataset.catalog().owner(BlockId(blocks.start)) == Some(NodeId(owner))
    };
    range.map(|number| (number, sample(number))).filter(|&(_, sample)| is_owned(sample)).collect()
}

/// Reads more through the arena than it holds, so that everything without a lease is evicted.
fn churn(view: &View, others: &[(usize, SampleId)]) {
    let dataset = dataset(view);
    let mut buffer = vec![0; LARGE_LEN];
    for _ in 0..3 {
        for &(number, sample) in others {
            view.session().read_at(&dataset, sample, 0, &mut buffer, &mut None).unwrap();
            assert!(buffer == content(number, LARGE_LEN), "{number}");
        }
    }
}

/// SEMANTICS: "If a lease is revoked before the client has delivered the bytes, the client reads them again, without an error."
#[test]
fn a_batch_whose_reader_slept_delivers_right_bytes_after_its_leases_were_revoked() {
    let (cluster, target) = cluster_of_long_names();
    let view = cluster.view(0);
    let alive = owned_by(&view, &target, 0..SMALL, 1);
    let stopped = owned_by(&view, &target, 0..SMALL, 2);
    let others = owned_by(&view, &target, SMALL..SMALL + LARGE, 1);
    assert!(others.len() as u64 * LARGE_LEN as u64 > ARENA_LEN_MIN && stopped.len() > 120);
    signal(cluster.pids()[&2], Signal::SIGSTOP);
    let samples: Vec<SampleId> = alive.iter().chain(&stopped).map(|&(_, sample)| sample).collect();
    let mut batch = view.session().read_many(&dataset(&view), &samples, Delivery::AsAvailable, OnMissing::Report).unwrap();
    // Samples of node 1 arrive at once. The errors about node 2, which does not answer, come later, and are more than the socket
    // can hold. The server then waits for this process, which does not read.
    std::thread::sleep(2 * Deadlines::DEFAULT.request + Duration::from_secs(3));
    churn(&cluster.view(0), &others);
    let (mut whole, mut wrong) = (0, 0);
    while let Some(delivered) = batch.next() {
        let Ok(delivered) = delivered else { break };
        if let Ok(bytes) = delivered.bytes {
            let (number, _) = alive[delivered.index];
            let is_right = bytes == content(number, len(number));
            (whole, wrong) = (whole + usize::from(is_right), wrong + usize::from(!is_right));
        }
    }
    assert!(wrong == 0, "{wrong} samples were wrong, and `is_good` returns {}", batch.is_good());
    assert_eq!(whole, alive.len(), "lost samples are read again");
}

/// SEMANTICS: "If a lease is revoked after the client has delivered a view, is_good returns false and get returns nothing, even
/// in a child that inherited the view from a parent that has exited."
#[test]
fn a_child_that_outlives_its_parent_does_not_trust_inherited_views() {
    let (cluster, target) = cluster_of_long_names();
    let view = cluster.view(0);
    let held = owned_by(&view, &target, 0..SMALL, 1);
    let others = owned_by(&view, &target, SMALL..SMALL + LARGE, 1);
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/posix/orphan_batch.py");
    let mut command = cluster.dayfly();
    command.args(["exec", "--node", "0", "--", "python3"]).arg(script);
    command.args(held.iter().map(|(number, _)| format!("{target}/{number}")));
    let mut parent = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut input, mut output) = (parent.stdin.take().unwrap(), BufReader::new(parent.stdout.take().unwrap()));
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    assert_eq!(line, format!("{} 0 1\n", held.len()));
    parent.kill().unwrap();
    parent.wait().unwrap();
    assert_accounts_are_settled(&cluster);
    churn(&view, &others);
    line.clear();
    input.write_all(b"\n").unwrap();
    output.read_line(&mut line).unwrap();
    let words: Vec<usize> = line.split_whitespace().map(|word| word.parse().unwrap()).collect();
    assert!(words[1] > 0, "nothing replaced the leased bytes");
    assert_eq!(words[2], 0, "{} of the child's files have wrong bytes, although `is_good` returns true", words[1]);
    drop(input);
    cluster.down();
}

/// SEMANTICS: "If a drive fails while a view shows bytes on it, the 64 MiB window of the segment around the failure is read by
/// pread from then on, so that no later reader mistakes the view's zeros for data."
#[test]
fn zeros_of_a_drive_that_failed_once_reach_no_later_batch() {
    if !runs_alone_with_views("leases::zeros_of_a_drive_that_failed_once_reach_no_later_batch") {
        return;
    }
    let cluster = session(1, &[], &[100_000; 20]);
    let view = cluster.view(0);
    let dataset = dataset(&view);
    let paths: Vec<Vec<u8>> = (0..20).map(path).collect();
    let paths: Vec<&[u8]> = paths.iter().map(Vec::as_slice).collect();
    let (segment, _) = dataset.segment_position(BlockId(0)).unwrap();
    // Truncate the segment and restore it, as if the drive failed for a moment.
    let segment = OpenOptions::new().read(true).write(true).open(format!("/proc/self/fd/{}", segment.number())).unwrap();
    let mut whole = vec![0; segment.metadata().unwrap().len() as usize];
    segment.read_exact_at(&mut whole, 0).unwrap();
    let mut before = view.read_many(&paths, Delivery::InOrder, OnMissing::Fail).unwrap();
    before.wait().unwrap();
    segment.set_len(0).unwrap();
    assert!((0..20).any(|index| before.get(index).unwrap() != content(index, 100_000)) && !before.is_good());
    segment.set_len(whole.len() as u64).unwrap();
    segment.write_all_at(&whole, 0).unwrap();
    let check = || {
        let mut after = view.read_many(&paths, Delivery::AsAvailable, OnMissing::Fail).unwrap();
        after.wait().unwrap();
        let wrong = (0..20).filter(|&index| after.get(index).unwrap() != content(index, 100_000)).count();
        assert!(wrong == 0, "{wrong} of 20 files are zeros, and `is_good` returns {}", after.is_good());
        assert!(after.is_good());
        let mut room = vec![vec![0; 100_000]; 20];
        let mut buffers: Vec<&mut [u8]> = room.iter_mut().map(Vec::as_mut_slice).collect();
        view.read_many_into(&paths, &mut buffers, OnMissing::Fail).unwrap();
        assert!((0..20).all(|index| room[index] == content(index, 100_000)));
    };
    check();
    std::thread::scope(|scope| scope.spawn(check).join().unwrap());
    assert!(!before.is_good(), "the earlier batch must not become good again");
    drop(before);
    cluster.down();
}

/// SEMANTICS: "While the node's own server stands still, a read that needs it waits, and the process says so once on standard error.
/// Only after 110 s without a sign of life does the read fail. Then further such reads fail at once, until there is a sign of life."
#[test]
fn reads_wait_while_the_nodes_own_server_stands_still_and_work_again_afterward() {
    // A tenth of the deadlines: reads fail after 11 s.
    let cluster = session(2, &["--deadlines-divisor", "10", "--lost-after", "6"], &[20_000; 60]);
    cluster.ok(&["tune", "--cache", "off"]);
    let view = cluster.view(0);
    let far = numbers(&view, 60, false);
    let near = numbers(&view, 60, true);
    let read = |number: usize| -> Result<(), ViewError> {
        let mut buffer = vec![0; 20_000];
        let file = view.open(&path(number)).unwrap();
        view.read_at(&file, 0, &mut buffer)?;
        assert!(buffer == content(number, 20_000));
        Ok(())
    };
    read(far[0]).unwrap();
    let server = cluster.pids()[&0];
    let deadlines = Deadlines::DEFAULT.scaled(10);
    // A standstill that a command does not wait for.
    signal(server, Signal::SIGSTOP);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| read(far[1]));
        let batch = scope.spawn(|| {
            let mut batch = view.read_many(&[&path(far[2])], Delivery::InOrder, OnMissing::Fail)?;
            batch.wait()
        });
        std::thread::sleep(deadlines.heartbeat * 2);
        assert!(!reader.is_finished() && !batch.is_finished());
        // The node's own blocks need no server.
        read(near[0]).unwrap();
        signal(server, Signal::SIGCONT);
        reader.join().unwrap().unwrap();
        batch.join().unwrap().unwrap();
    });
    signal(server, Signal::SIGSTOP);
    let start = Instant::now();
    let error = read(far[3]).unwrap_err();
    let first = start.elapsed();
    let start = Instant::now();
    far[4..14].iter().for_each(|&number| drop(read(number).unwrap_err()));
    let batch = view.read_many(&[&path(far[14])], Delivery::InOrder, OnMissing::Fail).map(|_| ());
    let others = start.elapsed();
    signal(server, Signal::SIGCONT);
    assert!(matches!(batch, Err(ClientError::Server(_))), "{batch:?}");
    assert!(error.to_string().contains("stood still"), "{error}");
    let silence = deadlines.silence();
    assert!((silence / 2..5 * silence).contains(&first), "{first:?}");
    assert!(others < silence / 2, "eleven more requests took {others:?}");
    wait_until("reads work again", || read(far[15]).is_ok());
    far.iter().for_each(|&number| read(number).unwrap());
    cluster.down();
}

/// SEMANTICS: "While the node's own server stands still, a read that needs it waits, and the process says so once on standard error."
#[test]
fn verify_waits_for_a_server_that_stands_still() {
    // A tenth of the deadlines, so that the server need not stand still for long.
    let cluster = session(2, &["--deadlines-divisor", "10", "--lost-after", "30"], &[8 << 20; 20]);
    let server = cluster.pids()[&1];
    let is_midway = |_| {
        let mut verify = cluster.dayfly();
        verify.args(["verify", "--from-every-node"]).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut verify = verify.spawn().unwrap();
        // Each server that has welcomed a process shows it its memory.
        let maps = format!("/proc/{}/maps", verify.id());
        let is_attached = || fs::read_to_string(&maps).is_ok_and(|maps| maps.matches("dayfly-region").count() >= 2);
        wait_until("it is attached to both", || is_attached() || verify_has_ended(verify.id()));
        signal(server, Signal::SIGSTOP);
        std::thread::sleep(Deadlines::DEFAULT.scaled(10).heartbeat * 3);
        let is_midway = verify.try_wait().unwrap().is_none();
        signal(server, Signal::SIGCONT);
        let status = harness::wait_for(&mut verify, Duration::from_secs(60)).expect("it ends");
        assert!(status.success(), "{}", std::io::read_to_string(verify.stderr.take().unwrap()).unwrap());
        is_midway
    };
    assert!((0..20).any(is_midway), "it always ended first");
    cluster.down();
}

fn verify_has_ended(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).map_or(true, |stat| stat.contains(") Z "))
}

/// Starts this test binary as a child process that runs `child_of_the_leases` with these words as its instructions.
fn child(cluster: &Cluster, words: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "leases::child_of_the_leases", "--nocapture"])
        .env(CHILD, words)
        .env("DAYFLY_RUNTIME_DIR", cluster.runtime.path())
        .env("DAYFLY_SESSION", &cluster.id)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits until a child prints that it is ready.
fn is_ready(child: &mut Child) -> BufReader<std::process::ChildStdout> {
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("ready") {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0, "the child has exited");
    }
    lines
}

/// Does nothing, except in the processes that the other tests start.
#[test]
fn child_of_the_leases() {
    let Ok(words) = std::env::var(CHILD) else { return };
    let words: Vec<&str> = words.split(' ').collect();
    let location = dayfly_client::locate::find(None).unwrap();
    let session = dayfly_client::Session::attach_to(&location, NodeId(0)).unwrap();
    let view = View::new(session);
    let files: Vec<usize> = words[2..].iter().map(|word| word.parse().unwrap()).collect();
    let paths: Vec<Vec<u8>> = files.iter().map(|&number| path(number)).collect();
    let paths: Vec<&[u8]> = paths.iter().map(Vec::as_slice).collect();
    match words[0] {
        // Holds a batch and makes no call until a line on standard input asks it to check the batch.
        "hold" => {
            let mut batch = view.read_many(&paths, Delivery::InOrder, OnMissing::Fail).unwrap();
            batch.wait().unwrap();
            println!("ready");
            std::io::stdin().read_line(&mut String::new()).unwrap();
            let all: Vec<Option<bool>> =
                (0..files.len()).map(|index| batch.get(index).map(|bytes| bytes == content(files[index], bytes.len()))).collect();
            println!("{} {}", batch.is_good(), all.iter().all(|right| *right == Some(true)));
        }
        // Reads in batches until it is killed, and checks every byte.
        "batches" => {
            println!("ready");
            let mut random = StdRng::seed_from_u64(words[1].parse().unwrap());
            let all: Vec<usize> = (0..paths.len()).collect();
            loop {
                let chosen: Vec<usize> =
                    (0..random.random_range(1..150)).map(|_| all[random.random_range(0..all.len())]).collect();
                let wanted: Vec<&[u8]> = chosen.iter().map(|&at| paths[at]).collect();
                if random.random_range(0..3) == 0 {
                    let mut room: Vec<Vec<u8>> = chosen.iter().map(|_| vec![0; 1 << 20]).collect();
                    let mut buffers: Vec<&mut [u8]> = room.iter_mut().map(Vec::as_mut_slice).collect();
                    let sizes = view.read_many_into(&wanted, &mut buffers, OnMissing::Fail).unwrap();
                    for ((&at, size), bytes) in chosen.iter().zip(sizes).zip(&room) {
                        let size = size.unwrap() as usize;
                        assert!(bytes[..size] == content(files[at], size), "{}", files[at]);
                    }
                    continue;
                }
                let delivery = if random.random() { Delivery::InOrder } else { Delivery::AsAvailable };
                let mut batch = view.read_many(&wanted, delivery, OnMissing::Fail).unwrap();
                while let Some(delivered) = batch.next() {
                    let Delivered { index, bytes } = delivered.unwrap();
                    let bytes = bytes.unwrap();
                    let (number, is_right) = (files[chosen[index]], bytes == content(files[chosen[index]], bytes.len()));
                    assert!(is_right || !batch.is_good(), "{number} is wrong");
                }
                let is_right =
                    |index: usize| batch.get(index).is_none_or(|bytes| bytes == content(files[chosen[index]], bytes.len()));
                let all_right = (0..chosen.len()).all(is_right);
                assert!(all_right || !batch.is_good(), "a sample was wrong when it was read a second time");
            }
        }
        other => panic!("{other}"),
    }
}

fn words(numbers: &[usize]) -> String {
    numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(" ")
}

/// SEMANTICS: "An order from which no sample is read for 30 s releases its window, and so does one from
/// which none is read for 5 s while other requests wait for room."
#[test]
fn idle_orders_release_their_window_to_waiting_requests() {
    let lens: Vec<usize> = (0..820).map(|number| if number < 800 { 100_000 } else { 4_000_000 }).collect();
    let cluster = session(2, &["--memory", &ARENA_LEN_MIN.to_string()], &lens);
    cluster.ok(&["tune", "--cache", "off", "--prefetch", "160"]);
    let view = cluster.view(0);
    let (mut small, large): (Vec<usize>, Vec<usize>) =
        numbers(&view, lens.len(), false).into_iter().partition(|&number| lens[number] < 1_000_000);
    let read = |number: usize| {
        let file = view.open(&path(number)).unwrap();
        let mut buffer = vec![0; lens[number]];
        assert_eq!(view.read_at(&file, 0, &mut buffer).unwrap(), lens[number]);
        assert!(buffer == content(number, lens[number]));
    };
    // The small files fill the arena without gaps. The order then holds every second small file, so a large file has no room.
    small.truncate(325);
    small.iter().for_each(|&number| read(number));
    let samples: Vec<SampleId> = small.iter().step_by(2).map(|&number| view.open(&path(number)).unwrap().sample()).collect();
    let order = view.session().submit(&dataset(&view), samples).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    large.iter().take(3).for_each(|&number| read(number));
    drop(order);
}

/// SEMANTICS: "All batches of one process together lease at most a quarter of the arena, and all processes together at most three
/// quarters, except for one chunk that each connection gets."
#[test]
fn idle_batches_of_one_process_leave_room_for_others() {
    let lens: Vec<usize> = (0..820).map(|number| if number < 800 { 100_000 } else { 4_000_000 }).collect();
    let cluster = session(2, &["--memory", &ARENA_LEN_MIN.to_string()], &lens);
    cluster.ok(&["tune", "--cache", "off"]);
    let view = cluster.view(0);
    let (small, large): (Vec<usize>, Vec<usize>) =
        numbers(&view, lens.len(), false).into_iter().partition(|&number| lens[number] < 1_000_000);
    // Each batch alone would need a quarter of the arena.
    let idle: Vec<_> = small[..83 * 4]
        .chunks(83)
        .map(|numbers| {
            let paths: Vec<Vec<u8>> = numbers.iter().map(|&number| path(number)).collect();
            let paths: Vec<&[u8]> = paths.iter().map(Vec::as_slice).collect();
            let mut batch = view.read_many(&paths, Delivery::InOrder, OnMissing::Fail).unwrap();
            batch.wait().unwrap();
            batch
        })
        .collect();
    let start = Instant::now();
    for &number in &large {
        let file = view.open(&path(number)).unwrap();
        let mut buffer = vec![0; lens[number]];
        assert_eq!(view.read_at(&file, 0, &mut buffer).unwrap(), lens[number]);
        assert!(buffer == content(number, lens[number]));
    }
    harness::assert_within(Deadlines::DEFAULT.arena, start);
    assert!(idle.iter().all(|batch| batch.is_good()), "no batch lost its leases");
    for (batch, numbers) in idle.iter().zip(small.chunks(83)) {
        assert!((0..83).all(|index| batch.get(index).unwrap() == content(numbers[index], 100_000)));
    }
    drop(idle);
    assert_accounts_are_settled(&cluster);
    cluster.down();
}

/// SEMANTICS: "A batch that would make its process lease more than a quarter keeps copies, so a program may keep as many finished
/// batches as its memory holds."
#[test]
fn a_process_that_keeps_its_batches_can_go_on_reading() {
    let lens: Vec<usize> = (0..60).map(|_| 4_000_000).collect();
    let cluster = session(2, &["--memory", &ARENA_LEN_MIN.to_string()], &lens);
    cluster.ok(&["tune", "--cache", "off"]);
    let view = cluster.view(0);
    let far = numbers(&view, lens.len(), false);
    assert!(far.iter().map(|&number| lens[number] as u64).sum::<u64>() > 2 * ARENA_LEN_MIN);
    let start = Instant::now();
    let keep = |&number: &usize| {
        let mut batch = view.read_many(&[&path(number)], Delivery::InOrder, OnMissing::Fail).unwrap();
        batch.wait().unwrap();
        batch
    };
    let kept: Vec<_> = far.iter().map(keep).collect();
    harness::assert_within(Deadlines::DEFAULT.arena, start);
    for (batch, &number) in kept.iter().zip(&far) {
        assert!(batch.is_good() && batch.get(0) == Some(&content(number, lens[number])[..]), "file {number}");
    }
    drop(kept);
    assert_accounts_are_settled(&cluster);
    cluster.down();
}

/// SEMANTICS: "A request that has waited for room for 0.5 s makes the server ask all lease holders to release theirs. A batch
/// that is asked releases its leases at its next call and keeps copies. Processes that make no call for 5 s after that lose their
/// leases, the largest holder first."
#[test]
fn idle_processes_lose_their_leases_to_waiting_requests_and_notice_it() {
    let lens: Vec<usize> = (0..320).map(|number| if number < 300 { 300_000 } else { 4_000_000 }).collect();
    let cluster = session(2, &["--memory", &ARENA_LEN_MIN.to_string()], &lens);
    cluster.ok(&["tune", "--cache", "off"]);
    let view = cluster.view(0);
    let far = numbers(&view, lens.len(), false);
    let (small, large): (Vec<usize>, Vec<usize>) = far.into_iter().partition(|&number| lens[number] < 1_000_000);
    // Each holder has its own part. Some holders are stopped, as by a debugger.
    let mut holders: Vec<Child> =
        small[..130].chunks(26).map(|part| child(&cluster, &format!("hold 0 {}", words(part)))).collect();
    let mut lines: Vec<_> = holders.iter_mut().map(is_ready).collect();
    holders.iter().skip(1).step_by(2).for_each(|holder| signal(holder.id() as i32, Signal::SIGSTOP));
    let start = Instant::now();
    for _ in 0..2 {
        for &number in &large {
            let file = view.open(&path(number)).unwrap();
            let mut buffer = vec![0; lens[number]];
            assert_eq!(view.read_at(&file, 0, &mut buffer).unwrap(), lens[number]);
            assert!(buffer == content(number, lens[number]));
        }
    }
    println!("large files beside idle holders took {:?}", start.elapsed());
    // Each holder has the correct bytes, or `is_good` is false.
    for (mut holder, lines) in holders.into_iter().zip(&mut lines) {
        signal(holder.id() as i32, Signal::SIGCONT);
        holder.stdin.take().unwrap().write_all(b"\n").unwrap();
        let mut line = String::new();
        lines.read_line(&mut line).unwrap();
        assert!(["true true\n", "false true\n", "false false\n"].contains(&line.as_str()), "{line}");
        holder.wait().unwrap();
    }
    assert_accounts_are_settled(&cluster);
    cluster.down();
}

/// Sends a message on a connection that the test itself opened.
fn send(stream: &mut UnixStream, message: &FromClient) -> std::io::Result<()> {
    let message = encode(message);
    stream.write_all(&[&encode_local(message.len()).unwrap()[..], &message].concat())
}

fn receive(stream: &mut UnixStream) -> FromServer {
    let mut header = [0; LOCAL_HEADER_LEN];
    stream.read_exact(&mut header).unwrap();
    let mut message = vec![0; decode_local(header).unwrap()];
    stream.read_exact(&mut message).unwrap();
    decode(&message).unwrap()
}

#[test]
fn a_client_can_send_while_the_server_blocks_on_sending_to_it() {
    let (cluster, target) = cluster_of_long_names();
    let view = cluster.view(0);
    let dataset = dataset(&view);
    let blocks = owned_by(&view, &target, 0..SMALL, 2).into_iter().map(|(_, sample)| {
        let (_, blocks) = dataset.catalog().sample(sample).unwrap();
        Chunk { block: BlockId(blocks.start), index: 0 }
    });
    let chunks: Vec<Chunk> = blocks.collect();
    cluster.kill(2);
    // Before that, the answer may be that this side is to ask again.
    wait_until("node 2 is lost", || {
        let status = serde_json::from_slice::<serde_json::Value>(&cluster.output(&["status", "--json"]).stdout);
        status.is_ok_and(|status| status["nodes"][2]["lost_for_ms"].is_u64())
    });
    let mut stream = UnixStream::connect(cluster.location().socket(NodeId(0))).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    send(&mut stream, &FromClient::Hello { version: VERSION }).unwrap();
    assert!(matches!(receive(&mut stream), FromServer::Welcome { .. }));
    // None of these chunks can be read. The errors are more than the socket holds, so the server waits for this side to read.
    send(&mut stream, &FromClient::Fetch { dataset: dataset.id(), chunks: chunks.clone(), recheck: false }).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    for number in 0..3000 {
        let sent = send(&mut stream, &FromClient::Release { leases: vec![number] });
        assert!(sent.is_ok(), "both sides send, and neither reads: {sent:?}");
    }
    let mut answered = 0;
    loop {
        match receive(&mut stream) {
            FromServer::Fetched { chunks, is_last, .. } => {
                answered += chunks.len();
                if is_last {
                    break;
                }
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(answered, chunks.len());
}

/// SEMANTICS: "If a lease is revoked before the client has delivered the bytes, the client reads them again, without an error."
/// SEMANTICS: "The server revokes the leases of a process that takes no bytes from its socket for 5 s,
/// because it is stopped or busy elsewhere. The process keeps its connection and continues when it
/// can."
#[test]
fn clients_stopped_at_random_continue_and_see_no_wrong_byte() {
    let seconds = std::env::var("DAYFLY_TEST_STRESS_SECONDS").map_or(8, |seconds| seconds.parse().unwrap());
    let lens: Vec<usize> = (0..500).map(|number| 10 + number * number * 7 % 200_000).collect();
    let cluster = session(2, &["--memory", &ARENA_LEN_MIN.to_string()], &lens);
    cluster.ok(&["tune", "--cache", "off"]);
    let all = words(&(1..lens.len()).collect::<Vec<_>>());
    let mut clients: Vec<Child> = (0..6).map(|seed| child(&cluster, &format!("batches {seed} {all}"))).collect();
    let _lines: Vec<_> = clients.iter_mut().map(is_ready).collect();
    let mut random = StdRng::seed_from_u64(7);
    let until = Instant::now() + Duration::from_secs(seconds);
    let mut stops = 0;
    while Instant::now() < until {
        let which = random.random_range(0..clients.len());
        signal(clients[which].id() as i32, Signal::SIGSTOP);
        // Sometimes stop for longer than a server waits for a client.
        std::thread::sleep(Duration::from_millis(if random.random_range(0..6) == 0 {
            6000
        } else {
            random.random_range(1..400)
        }));
        signal(clients[which].id() as i32, Signal::SIGCONT);
        stops += 1;
    }
    println!("{stops} stops");
    for client in &mut clients {
        assert!(client.try_wait().unwrap().is_none(), "a client has exited by itself");
        client.kill().unwrap();
        client.wait().unwrap();
    }
    assert_accounts_are_settled(&cluster);
    cluster.down();
}
