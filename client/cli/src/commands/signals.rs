//! Waits for signals.

use nix::sys::signal::Signal;
use tokio::signal::unix::{Signal as Signals, SignalKind, signal};

use crate::failure::Failure;

/// The signals that a user or a manager sends to a job.
pub(super) struct Interruptions {
    interrupt: Signals,
    terminate: Signals,
    hangup: Signals,
    quit: Signals,
    user_1: Signals,
    user_2: Signals,
    /// The number of the last signal that arrived.
    last: i32,
}

impl Interruptions {
    pub(super) fn new() -> Result<Self, Failure> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
            quit: signal(SignalKind::quit())?,
            user_1: signal(SignalKind::user_defined1())?,
            user_2: signal(SignalKind::user_defined2())?,
            last: 0,
        })
    }

    /// Waits for any of the signals.
    pub(super) async fn next_of_all(&mut self) -> i32 {
        self.last = tokio::select! {
            _ = self.interrupt.recv() => Signal::SIGINT as i32,
            _ = self.terminate.recv() => Signal::SIGTERM as i32,
            _ = self.hangup.recv() => Signal::SIGHUP as i32,
            _ = self.quit.recv() => Signal::SIGQUIT as i32,
            _ = self.user_1.recv() => Signal::SIGUSR1 as i32,
            _ = self.user_2.recv() => Signal::SIGUSR2 as i32,
        };
        self.last
    }

    /// Returns the exit status that shells report for a process that the last signal ended.
    pub(super) fn status(&self) -> u8 {
        128 + self.last as u8
    }

    /// Waits for a signal that ends the job: any except SIGUSR1 and SIGUSR2.
    pub(super) async fn next(&mut self) -> i32 {
        loop {
            let number = self.next_of_all().await;
            if number != Signal::SIGUSR1 as i32 && number != Signal::SIGUSR2 as i32 {
                return number;
            }
        }
    }
}
