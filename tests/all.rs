//! The tests with real servers: one program, so that tests of different kinds run beside each other, and most of them wait.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod chaos;
mod commands;
mod conflicts;
mod copies;
mod cut_off;
mod deadlines;
mod doctor;
mod drives;
mod durability;
mod ends;
mod examples;
mod faults;
mod harness;
mod hostile;
mod integrity;
mod launch;
mod launchers;
mod leases;
mod locality;
mod mappings;
mod membership;
mod model;
mod node_loss;
mod origins;
mod partial_fit;
mod posix;
mod rdma;
mod read_path;
mod recovery;
mod rejoin;
mod restream;
mod session;
mod stage_in;
mod stage_in_ends;
mod strangers;
mod streams;
mod symlinks;
