//! How long a server may serve and publish without hearing from the supervisor. A state machine that counts ticks, so that a server
//! that was stopped does not find its time expired when it continues.

use dayfly_meta::deadlines::Deadlines;

/// A server's lease, as the server itself counts it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tenure {
    publish_ticks: u32,
    lease_ticks: u32,
    /// Ticks since the last renewal.
    silent_ticks: u32,
    /// Set once the session goes on without its supervisor, as `--keep` asks.
    is_alone: bool,
}

impl Tenure {
    /// Begins a lease that has just been renewed.
    pub fn new(deadlines: &Deadlines) -> Self {
        let ticks = |limit: std::time::Duration| (limit.as_millis() / deadlines.lease_interval.as_millis().max(1)) as u32;
        Self {
            publish_ticks: ticks(deadlines.publish_lease),
            lease_ticks: ticks(deadlines.lease),
            silent_ticks: 0,
            is_alone: false,
        }
    }

    /// Records a renewal.
    pub fn renew(&mut self) {
        self.silent_ticks = 0;
    }

    /// Lets one interval pass.
    pub fn tick(&mut self) {
        self.silent_ticks = self.silent_ticks.saturating_add(1);
    }

    /// Records that the session goes on without its supervisor. From then on, nobody changes the roster.
    pub fn go_on_alone(&mut self) {
        self.is_alone = true;
    }

    /// Returns whether the session goes on without its supervisor.
    pub fn is_alone(&self) -> bool {
        self.is_alone
    }

    /// Returns whether this server may make datasets visible.
    pub fn may_publish(&self) -> bool {
        self.is_alone || self.silent_ticks < self.publish_ticks
    }

    /// Returns whether the server must end.
    pub fn is_over(&self) -> bool {
        !self.is_alone && self.silent_ticks >= self.lease_ticks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_stops_publishing_before_it_ends_and_a_renewal_gives_it_all_its_time_again() {
        let mut tenure = Tenure::new(&Deadlines::DEFAULT);
        (0..19).for_each(|_| tenure.tick());
        assert!(tenure.may_publish());
        tenure.tick();
        assert!(!tenure.may_publish() && !tenure.is_over());
        (0..70).for_each(|_| tenure.tick());
        assert!(tenure.is_over());
        tenure.renew();
        assert!(tenure.may_publish() && !tenure.is_over());
        (0..99).for_each(|_| tenure.tick());
        tenure.go_on_alone();
        assert!(tenure.may_publish() && !tenure.is_over());
    }
}
