//! Links under faults: drives that fail while the kernel sends from them, flows that go black, drives that hang.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::sync::atomic::AtomicBool;

use tokio::net::TcpStream;
use tokio::sync::oneshot;

use super::seal::split;
use super::stream::{FileRange, Outgoing, writer};
use super::*;

/// `docs/PROTOCOL.md`: bytes that a drive does not give are made up with zeros, and the stream goes on.
#[tokio::test]
async fn a_file_that_fails_while_the_kernel_sends_it_does_not_end_the_stream() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, vec![7; 3 << 20]).unwrap();
    let good = Arc::new(std::fs::File::open(&path).unwrap());
    // It cannot be read: EBADF.
    let unreadable = Arc::new(OpenOptions::new().write(true).open(&path).unwrap());
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let mut far = listener.accept().unwrap().0;
    let (_read, write) = split(stream, None);
    let (sender, writing) = writer(write);
    let writing = tokio::spawn(writing);
    let got = std::thread::spawn(move || {
        let mut got = Vec::new();
        far.read_to_end(&mut got).unwrap();
        got
    });
    let mut failures = Vec::new();
    // Short by half a frame, unreadable, and whole.
    for (file, offset) in [(&good, (1 << 20) + (1 << 19)), (&unreadable, 0), (&good, 0)] {
        let (sent, failure) = oneshot::channel();
        let range = FileRange { file: file.clone(), offset, len: 2 << 20, revoked: Arc::new(AtomicBool::new(false)) };
        sender.send(Outgoing::File { request: 1, range, sent }).await.unwrap();
        failures.push(failure.await.unwrap());
    }
    drop(sender);
    writing.await.unwrap().unwrap();
    let got = got.join().unwrap();
    let _ = writeln!(std::io::stderr(), "{failures:?}");
    assert!(failures[0].as_ref().is_some_and(|reason| reason.contains("shorter")));
    assert!(failures[1].as_ref().is_some_and(|reason| reason.contains("Bad file descriptor")));
    assert_eq!(failures[2], None);
    let frame = 24 + (1 << 20);
    assert_eq!(got.len(), 6 * frame);
    let is_all = |frame_number: usize, range: std::ops::Range<usize>, byte: u8| {
        got[frame_number * frame + 24..][range].iter().all(|&got| got == byte)
    };
    assert!(is_all(0, 0..1 << 20, 7) && is_all(1, 0..1 << 19, 7) && is_all(1, 1 << 19..1 << 20, 0));
    assert!(is_all(2, 0..1 << 20, 0) && is_all(3, 0..1 << 20, 0));
    assert!(is_all(4, 0..1 << 20, 7) && is_all(5, 0..1 << 20, 7));
}
