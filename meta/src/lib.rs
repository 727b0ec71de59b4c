//! What all Dayfly processes agree on: identifiers, bounds, the catalog's and the locations' layouts, placement and the
//! messages. No sockets, no threads, no clock and no store live here; a value of this crate means the same in a server,
//! in a client and on the wire.

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
pub mod segment;
pub mod shared;
pub mod status_page;
pub mod wire;
