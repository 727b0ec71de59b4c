//! Opens the transport that the user asked for. The rest of the server sees only `dyn Transport`.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

#[cfg(feature = "async-rdma")]
use crate::async_rdma::AsyncRdma;
use crate::contract::Transport;
use crate::rdma::{Choice, Rdma, RdmaError};
use crate::selection::Preference;
use crate::tcp::{Identity, Purpose, Tcp};

/// The user's choice of network and card.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The network that the user asks for.
    pub preference: Preference,
    /// The RDMA card to use, if there are several.
    pub choice: Choice,
}

/// Binds the listener and opens the RDMA card, if there is one. Peers reach this node at the returned address.
///
/// # Errors
/// The listener cannot be bound. A card that cannot be opened is not an error here: see [`Transport::ability`].
pub async fn open(identity: Identity, address: SocketAddr, options: &Options) -> io::Result<(Arc<dyn Transport>, SocketAddr)> {
    let is_sealed = identity.purpose == Purpose::SealedPeer;
    let deadlines = identity.deadlines;
    let (tcp, address) = Tcp::bind(identity, address).await?;
    if is_sealed {
        return Ok((Arc::new(Rdma::without(tcp, options.preference, RdmaError::Sealed)), address));
    }
    #[cfg(feature = "async-rdma")]
    if options.preference == Preference::AsyncRdma {
        return Ok((Arc::new(AsyncRdma::new(tcp, &options.choice, deadlines)), address));
    }
    Ok((Arc::new(Rdma::new(tcp, options.preference, &options.choice, deadlines)), address))
}
