//! Measures the catalog of a large dataset: bytes per sample, the time to attach, and the time of a
//! `stat` by path.

use std::hint::black_box;

use clap::Args;
use dayfly_meta::catalog::{
    self, About, CatalogBuilder, Compression, Member, MemberKey, MemberKind, Place, Source, SourceKind, StoredBlock, Version,
};
use dayfly_meta::id::NodeId;
use dayfly_meta::path::walk_order;

use crate::measure::{Failure, Numbers, median, time};

/// Measure a catalog of many samples in 1,000 directories
#[derive(Args)]
pub(crate) struct Catalog {
    /// Number of samples
    #[arg(long, default_value_t = 1_000_000)]
    samples: u64,
    /// Number of runs; the medians are printed
    #[arg(long, default_value_t = 5)]
    runs: usize,
}

fn member(number: u64) -> Member {
    let path = format!("train/n{:08}/n{:08}_{number}.JPEG", number % 1000, number % 1000).into_bytes();
    let block = StoredBlock { owner: NodeId((number % 4) as u16), arrival: number as u32 };
    let place = Place::Bytes { offset: number * 100_352 };
    let kind = MemberKind::File { size: 100_000 + number % 1000, place, blocks: vec![block], checksums: vec![number as u32] };
    let key = MemberKey { source: 0, offset: number * 100_352 };
    Member { path, key, ticket: 0, mode: 0o644, mtime_s: 1_400_000_000, mtime_ns: 0, kind }
}

pub(crate) fn run(arguments: &Catalog) -> Result<(), Failure> {
    let mut members: Vec<Member> = (0..arguments.samples).map(member).collect();
    let names: u64 =
        members.iter().map(|member| member.path.rsplit(|&byte| byte == b'/').next().map_or(0, <[u8]>::len) as u64).sum();
    members.sort_by(|left, right| walk_order(&left.path, &right.path));
    let source = Source {
        path: b"/pfs/train.tar".to_vec(),
        prefix: Vec::new(),
        kind: SourceKind::Tar,
        compression: Compression::None,
        version: Version { size: (arguments.samples + 1) * 101_376, ..Version::default() },
        inode: 1,
    };
    let capacities = vec![1 << 40; 4];
    let scratch = tempfile::tempfile;
    let (build_s, built) = time(|| -> Result<_, catalog::BuildError> {
        let mut builder = CatalogBuilder::new(&scratch, About { capacities, ..About::default() }, &[source])?;
        members.iter().try_for_each(|member| builder.add(&member.path, member, 1))?;
        builder.finish(&|| {})
    });
    let built = built?;
    println!("samples                          {}", arguments.samples);
    println!("catalog                          {} bytes", built.len);
    println!("a sample, besides its name       {:.1} bytes", (built.len - names) as f64 / arguments.samples as f64);
    println!("build from sorted members        {build_s:.2} s");
    let check_s = time(|| catalog::Catalog::open(&built.file).and_then(|catalog| catalog.check(4)));
    check_s.1?;
    println!("full check, once per server      {:.2} s", check_s.0);
    let attach: Vec<f64> =
        (0..arguments.runs).map(|_| time(|| black_box(catalog::Catalog::open(&built.file).is_ok())).0).collect();
    println!("attach                           {:.1} us", median(attach) * 1e6);
    let mapped = catalog::Catalog::open(&built.file)?;
    let mut paths: Vec<Vec<u8>> = members.into_iter().map(|member| member.path).collect();
    // The first round brings the pages into memory and is not counted.
    black_box(stat_all(&mapped, &Paths::new(&paths)));
    let per_stat = |paths: &[Vec<u8>]| {
        let paths = Paths::new(paths);
        let rounds = (0..arguments.runs).map(|_| time(|| black_box(stat_all(&mapped, &paths))).0);
        median(rounds.collect()) * 1e9 / paths.ends.len() as f64
    };
    println!("stat by path, in walk order      {:.0} ns", per_stat(&paths));
    Numbers(1).shuffle(&mut paths);
    println!("stat by path, in random order    {:.0} ns", per_stat(&paths));
    paths.truncate(10_000);
    println!("stat by path, among 10,000 paths {:.0} ns", per_stat(&paths));
    Ok(())
}

/// Paths back to back in one buffer. A real program has just built the path that it looks up, so
/// reading the path must not cost a cache miss here either.
struct Paths {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Paths {
    fn new(paths: &[Vec<u8>]) -> Self {
        let ends = paths.iter().scan(0, |end, path| {
            *end += path.len();
            Some(*end)
        });
        Self { ends: ends.collect(), bytes: paths.concat() }
    }
}

fn stat_all(catalog: &catalog::Catalog, paths: &Paths) -> u64 {
    let mut start = 0;
    let mut sizes = 0;
    for &end in &paths.ends {
        sizes += catalog.stat(&paths.bytes[start..end]).map_or(0, |(_, attributes)| attributes.size);
        start = end;
    }
    sizes
}
