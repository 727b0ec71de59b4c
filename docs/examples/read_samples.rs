//! Lists a dataset and reads all of its samples in the shuffled order of one epoch.
//!
//! Run it within a session, on any node:
//!
//! ```text
//! dayfly exec -- target/debug/examples/read_samples /dayfly/train 7 0
//! ```

use std::error::Error;

use dayfly_client::{Delivery, FileKind, OnMissing, Samples, Session, View, locate};
use dayfly_meta::id::SampleId;
use dayfly_meta::path::{display, join};

/// The number of samples that one message to the server requests.
const BATCH: usize = 64;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let root = arguments.next().ok_or("usage: read_samples DATASET [SEED [EPOCH]]")?;
    let mut number = || arguments.next().map_or(Ok(0), |text| text.parse::<u64>());
    let (seed, epoch) = (number()?, number()?);

    // Attach to the session that the environment names. Until the first remote read, this is the only message to the server.
    let view = View::new(Session::attach(&locate::find(None)?)?);
    let session = view.session();

    // Lookups and listings read mapped memory.
    for entry in view.open_directory(root.as_bytes())?.entries(0) {
        let kind = match entry.kind {
            FileKind::File => "file",
            FileKind::Directory => "directory",
            FileKind::Symlink => "symlink",
        };
        println!("{kind} {}", display(entry.name));
    }

    // The order is the same in every process that passes the same seed and epoch. If there are several readers, reader r of n takes
    // `samples.epoch(seed, epoch).skip(r).step_by(n)`.
    let dataset = view.dataset_of(root.as_bytes())?;
    if view.canonical(root.as_bytes())? != join(session.prefix(), dataset.target()) {
        return Err(format!("'{root}' is only a part of a dataset; an epoch covers the whole dataset").into());
    }
    let samples = Samples::of(dataset.catalog());
    let order: Vec<SampleId> = samples.epoch(seed, epoch).collect();

    // From now on, until `_order` is dropped, the server prefetches along this order.
    let _order = session.submit(&dataset, order.iter().copied())?;

    for wanted in order.chunks(BATCH) {
        let mut batch = session.read_many(&dataset, wanted, Delivery::InOrder, OnMissing::Fail)?;
        while let Some(delivered) = batch.next() {
            let delivered = delivered?;
            // The bytes lie where the batch found them, in mapped memory: no copy is made.
            let bytes = delivered.bytes.map_err(ToString::to_string)?;
            let sum: u64 = bytes.iter().map(|&byte| u64::from(byte)).sum();
            let entry = samples.entry(wanted[delivered.index]).and_then(|id| dataset.catalog().entry(id));
            let path = entry.map(|entry| dataset.catalog().path(&entry)).ok_or("a sample without a name")?;
            let path = join(session.prefix(), &join(dataset.target(), &path));
            println!("sample {} {} {sum}", display(&path), bytes.len());
        }
        // Check only now, after the last look at the bytes, whether all of them were valid.
        if !batch.is_good() {
            return Err("some bytes were lost while they were read; read the batch again".into());
        }
    }
    Ok(())
}
