//! Tests how much work and kernel memory RDMA operations cost, and whether their bytes are read through the page cache.

use std::io::Write;
use std::time::{Duration, Instant};

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_thousand_operations_leave_kernel_memory_unchanged() {
    if !has_card() {
        return;
    }
    let nodes = NodePair::new(Limits::default()).await;
    let lens = [1000; 64];
    let rounds = async |count: usize| {
        let mut longest = Duration::ZERO;
        for _ in 0..count {
            let start = Instant::now();
            nodes.pull(b"bulk", &lens).await;
            longest = longest.max(start.elapsed());
        }
        longest
    };
    rounds(100).await;
    let (before, works, wake_ups) = (slabs(), nodes.theirs.status().works, nodes.theirs.status().wake_ups);
    let longest = rounds(100_000 / 64 + 1).await;
    let works = nodes.theirs.status().works - works;
    let (cache, grown) = growth(&before);
    let figures = format!(
        "{works} operations: {} wake-ups, longest batch {longest:?}, {cache} grew most: by {grown} objects",
        nodes.theirs.status().wake_ups - wake_ups
    );
    let _ = writeln!(std::io::stderr(), "{figures}");
    assert!(works >= 100_000 && longest < Duration::from_secs(1) && grown < 200, "{figures}");
    assert_eq!((nodes.ours.status().failed, nodes.theirs.status().failed), (0, 0));
}

/// Counts the work for one batch on both sides.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_of_64_takes_few_posts_completions_and_wake_ups() {
    if !has_card() {
        return;
    }
    let nodes = NodePair::new(Limits::default()).await;
    nodes.pull(b"bulk", &[110_000; 64]).await;
    let (ours, theirs) = (nodes.ours.status(), nodes.theirs.status());
    let batches = 20;
    for _ in 0..batches {
        nodes.pull(b"bulk", &[110_000; 64]).await;
    }
    let each = |before: u64, after: u64| (after - before) as f64 / f64::from(batches);
    let counts = |name: &str, before: &Network, after: &Network| {
        let counts = [
            each(before.posts, after.posts),
            each(before.works, after.works),
            each(before.completions, after.completions),
            each(before.wake_ups, after.wake_ups),
        ];
        let [posts, works, completions, wake_ups] = counts;
        let figures = format!("{name}: {posts} posts of {works} operations, {completions} completions, {wake_ups} wake-ups");
        let _ = writeln!(std::io::stderr(), "a batch of 64 pieces of 110 KB each, {figures}");
        counts
    };
    let asker = counts("asker", &ours, &nodes.ours.status());
    let owner = counts("owner", &theirs, &nodes.theirs.status());
    // The asker posts one request. The owner posts 64 writes, in chains of at most 1 MiB, and the answer.
    assert!(asker[0] == 1.0 && asker[1] == 1.0 && asker[2] == 2.0, "{asker:?}");
    assert!(owner[0] <= 9.0 && owner[1] <= 66.0 && owner[2] <= 10.0, "{owner:?}");
}

/// Reads of large pieces that are not in the page cache bypass it, whatever the lengths of the pieces.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cold_pieces_bypass_the_page_cache() {
    struct FileService(Arc<std::fs::File>);

    #[async_trait]
    impl Service for FileService {
        async fn pulled(&self, _from: NodeId, _message: Vec<u8>, room: Vec<u64>) -> Result<crate::Answer, crate::Refusal> {
            let piece = |(at, &len): (usize, &u64)| {
                let (offset, revoked) = (at as u64 * (3 << 20), Arc::default());
                crate::Piece::File { file: self.0.clone(), offset, len, revoked }
            };
            Ok(crate::Answer { message: vec![], pieces: room.iter().enumerate().map(piece).collect() })
        }

        async fn offered(&self, _from: NodeId, _message: Vec<u8>, _incoming: crate::Incoming) -> Result<Vec<u8>, crate::Refusal> {
            Err("nothing".into())
        }
    }

    if !has_card() {
        return;
    }
    // The virtual machine's own file system is in memory, so this test creates one on which files can be uncached.
    let folder = tempfile::tempdir().unwrap();
    let script = "truncate -s 100M disk && mkfs.ext4 -q disk && mkdir mnt && mount -o loop disk mnt";
    let mounted = Command::new("sh").args(["-c", script]).current_dir(&folder).status().unwrap();
    assert!(mounted.success(), "needs a loop device and ext4");
    let content = pattern(31 << 20);
    let mut file = std::fs::File::options().create_new(true).read(true).write(true).open(folder.path().join("mnt/f")).unwrap();
    file.write_all(&content).unwrap();
    file.sync_all().unwrap();
    std::fs::remove_file(folder.path().join("mnt/f")).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let file = Arc::new(file);
    let second = direct::DirectFiles::default().get(&file, 31 << 20).unwrap();
    let ((ours, _), (theirs, address)) = (tcp(0).await, tcp(1).await);
    let (ours, theirs) = (rdma(ours, Limits::default()), rdma(theirs, Limits::default()));
    let serving = theirs.serve(Arc::new(FileService(file.clone()))).await.unwrap();
    let connection = ours.connect(NodeId(1), address).await.unwrap();
    let region = ours.region(48 << 20).unwrap();
    let lens = [70_000, 1 << 20, (2 << 20) + 5000, 110_000, 65_536, 4000, 1_100_001, 110_000, 3 << 20, 99_999];
    for is_cold in [true, false] {
        let slots = lens.iter().map(|&len| region.slot(len).unwrap()).collect();
        let pulled = connection.pull(vec![], slots, TIMEOUT).await.unwrap();
        for (at, (slot, len)) in pulled.slots.iter().zip(lens).enumerate() {
            let start = at * (3 << 20);
            assert!(slot[..len as usize] == content[start..start + len as usize], "piece {at}");
            assert!(!is_cold || len < 65_536 || !second.is_cached(start as u64, len as usize), "piece {at} was cached");
        }
        (0..lens.len())
            .for_each(|at| drop(std::os::unix::fs::FileExt::read_at(&*file, &mut vec![0; 4 << 20], at as u64 * (3 << 20))));
    }
    // There are more answers than permits to read from the drives. Some of their pieces are read
    // through the page cache, and others bypass it.
    rustix::fs::fadvise(&*file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let mixed = (0..2 * dayfly_meta::limits::DRIVE_READERS_MAX).map(|_| async {
        let slots = [110_000, 3000, 110_000, 5000].map(|len| region.slot(len).unwrap()).into();
        connection.pull(vec![], slots, TIMEOUT).await.unwrap()
    });
    for pulled in futures_util::future::join_all(mixed).await {
        assert!(pulled.slots[3][..5000] == content[9 << 20..(9 << 20) + 5000]);
    }
    assert_eq!(ours.status().failed, 0);
    drop((connection, serving, theirs, second, file));
    until("the file system is free", || Command::new("umount").arg(folder.path().join("mnt")).status().unwrap().success()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn registered_memory_does_not_grow_with_peers() {
    if !has_card() {
        return;
    }
    let (tcp, address) = tcp(1).await;
    let theirs = rdma(tcp, Limits::default());
    let _serving = theirs.serve(Echo::new(theirs.region(16 << 20).unwrap())).await.unwrap();
    let registered = theirs.status().registered_bytes;
    let fixed = dayfly_meta::limits::RDMA_STAGING_LEN
        + dayfly_meta::limits::RDMA_MESSAGES_LEN
        + u64::from(dayfly_meta::limits::RDMA_RECEIVES * dayfly_meta::limits::RDMA_REQUEST_LEN_MAX);
    assert_eq!(registered, fixed + (16 << 20));
    let mut peers = Vec::new();
    for node in [0, 2, 3, 4, 5] {
        let (tcp, _) = crate::conformance::tcp(node).await;
        let peer =
            Rdma::with_limits(tcp, Preference::Rdma, &Choice::default(), Limits { staging_len: 1 << 20, ..Limits::default() });
        peers.push((peer.connect(NodeId(1), address).await.unwrap(), peer));
    }
    assert_eq!((theirs.status().registered_bytes, theirs.status().queue_pairs), (registered, 5));
    drop(peers);
    until("no queue pair", || theirs.status().queue_pairs == 0).await;
}

/// Measures the same requests with both providers, for `docs/DECISIONS.md`.
#[cfg(feature = "async-rdma")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_two_providers_are_compared() {
    if !has_card() {
        return;
    }
    for name in ["verbs", "async-rdma"] {
        let ((ours, _), (theirs, address)) = (tcp(0).await, tcp(1).await);
        let provider = |tcp: Tcp| -> Box<dyn Transport> {
            match name {
                "verbs" => Box::new(rdma(tcp, Limits::default())),
                _ => Box::new(crate::async_rdma::AsyncRdma::new(tcp, &Choice::default(), Deadlines::DEFAULT)),
            }
        };
        let (ours, theirs) = (provider(ours), provider(theirs));
        let _serving = theirs.serve(Echo::new(theirs.region(16 << 20).unwrap())).await.unwrap();
        let connection = ours.connect(NodeId(1), address).await.unwrap();
        let region = ours.region(48 << 20).unwrap();
        let run = async |count: usize, lens: &[u64]| {
            let (start, mut longest) = (Instant::now(), Duration::ZERO);
            for _ in 0..count {
                let start = Instant::now();
                let slots = lens.iter().map(|&len| region.slot(len).unwrap()).collect();
                connection.pull(b"file".to_vec(), slots, TIMEOUT).await.unwrap();
                longest = longest.max(start.elapsed());
            }
            (count as f64 / start.elapsed().as_secs_f64(), longest)
        };
        run(500, &[4000]).await;
        let before = slabs();
        let (rate, longest) = run(10_000, &[4000]).await;
        let (cache, grown) = growth(&before);
        let (batches, longest_batch) = run(20, &[110_000; 64]).await;
        let figures = format!(
            "{name}: {rate:.0} reads per second of 4 KB each, one by one, the longest {longest:?}; after 10,000 reads {cache} has \
             grown by {grown} objects; {:.0} MiB/s in batches of 64 pieces of 110 KB each, the longest {longest_batch:?}",
            batches * 64.0 * 110_000.0 / f64::from(1 << 20)
        );
        let _ = writeln!(std::io::stderr(), "{figures}");
    }
}
