//! The types and file formats that all processes of a Dayfly session share: identifiers, bounds, the catalog, the locations table,
//! placement, and messages. A value of one of these types means the same in a server, in a client, and on the wire.
//!
//! The parts, from the bottom up:
//!
//! - [`id`], [`limits`], [`deadlines`], [`path`](mod@path), [`checksum`](mod@checksum) and [`chunk`] are the vocabulary.
//! - [`placement`] decides which node owns a block, and which nodes come next, from nothing but a seed, a path and the members.
//!   [`stored_share`] decides which blocks are stored if not all of them fit. [`roster`] says who is a member.
//! - [`catalog`] is a dataset's index, the same on every node; [`locations`] says which blocks are on this node, and
//!   [`segment`] defines how they are packed there.
//! - [`shared`] maps memory that several processes use; [`status_page`] defines what a server shows its clients
//!   in such memory.
//! - [`wire`] defines all messages; [`metrics`] lists what a node counts.
//!
//! The crate has no sockets, threads or clock, and opens no files: it maps and writes the files that it is given.
//!
//! # Example
//!
//! A stage-in asks [`placement`] for the owner of a block and records the owner in the catalog, where every node can
//! look it up:
//!
//! ```
//! use dayfly_meta::catalog::{About, Catalog, CatalogBuilder, Compression, Source, SourceKind, Version};
//! use dayfly_meta::catalog::{Member, MemberKey, MemberKind, Place, StoredBlock};
//! use dayfly_meta::checksum::checksum;
//! use dayfly_meta::id::{BlockId, NodeId};
//! use dayfly_meta::placement::{self, NodeSet, Placement};
//!
//! let nodes = [0, 1].map(|node| placement::Member { node: NodeId(node), capacity: 1 << 40 });
//! let owner = Placement::new(7, &nodes).owner(b"train/cat.jpg", 0, &NodeSet::new()).expect("no member is skipped");
//!
//! let source = Source {
//!     path: b"/pfs/train.tar".to_vec(),
//!     prefix: Vec::new(),
//!     kind: SourceKind::Tar,
//!     compression: Compression::None,
//!     version: Version { size: 10_240, ..Version::default() },
//!     inode: 0,
//! };
//! let member = Member {
//!     path: b"train/cat.jpg".to_vec(),
//!     key: MemberKey { source: 0, offset: 512 },
//!     ticket: 0,
//!     mode: 0o644,
//!     mtime_s: 0,
//!     mtime_ns: 0,
//!     kind: MemberKind::File {
//!         size: 4,
//!         place: Place::Bytes { offset: 512 },
//!         blocks: vec![StoredBlock { owner, arrival: 0 }],
//!         checksums: vec![checksum(b"meow")],
//!     },
//! };
//! let scratch = || tempfile::tempfile();
//! let about = About { seed: 7, capacities: nodes.map(|node| node.capacity).to_vec(), ..About::default() };
//! let mut builder = CatalogBuilder::new(&scratch, about, &[source])?;
//! builder.add(&member.path, &member, 1)?;
//! let built = builder.finish(&|| {})?;
//!
//! let catalog = Catalog::open(&built.file)?;
//! catalog.check(nodes.len())?;
//! let (entry, attributes) = catalog.stat(b"train/cat.jpg").expect("it was added");
//! assert_eq!(attributes.size, 4);
//! let (_, blocks) = catalog.sample(entry.sample().expect("a file is a sample")).expect("the catalog is whole");
//! assert_eq!(catalog.owner(BlockId(blocks.start)), Some(owner));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod catalog;
pub mod checksum;
pub mod chunk;
pub mod deadlines;
pub mod id;
pub mod limits;
pub mod locations;
pub mod metrics;
pub mod path;
pub mod placement;
pub mod roster;
pub mod segment;
pub mod shared;
pub mod status_page;
pub mod stored_share;
#[cfg(test)]
mod test_seed;
pub mod text;
pub mod wire;
