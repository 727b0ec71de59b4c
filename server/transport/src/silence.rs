//! Decides which links to a peer, and whether the peer, have been silent for too long. This has neither a clock nor links: its caller
//! says what time it is and when bytes last moved. So the simulation runs the same rules.
//!
//! Only several looks in a row count. A caller that looks much later than it meant to was itself suspended or starved, and must read
//! first what has arrived in the meantime; so such a look accuses nobody, and the counting begins anew.

use std::time::Duration;

use dayfly_meta::deadlines::Deadlines;

/// When bytes last moved on a link: times since a start that all links of a peer have in common.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// When bytes last arrived.
    pub received: Duration,
    /// When bytes of a payload last left; zero if none has.
    pub sent: Duration,
}

/// What a look has found.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Silent {
    /// The numbers of the links that have been silent for too long, while another one was not.
    pub links: Vec<usize>,
    /// Whether all links have been.
    pub is_peer: bool,
}

/// Counts looks at the links of one peer.
pub struct SilenceWatch {
    deadlines: Deadlines,
    /// For each link, the number of looks in a row that found it silent while others were not.
    links: Vec<u32>,
    /// The number of looks in a row that found all links silent.
    peer: u32,
}

impl SilenceWatch {
    /// Begins with so many links.
    pub fn new(deadlines: Deadlines, links: usize) -> Self {
        Self { deadlines, links: vec![0; links], peer: 0 }
    }

    /// Returns how long to sleep until the next look: until the next link may have been silent for too long. `links` are those that
    /// are up.
    pub fn pause(&self, now: Duration, links: &[Option<Moved>]) -> Duration {
        let oldest = links.iter().flatten().map(|link| link.received).min().unwrap_or(now);
        let Deadlines { link_silent, look_interval, ping_interval, .. } = self.deadlines;
        link_silent.saturating_sub(now.saturating_sub(oldest)).clamp(look_interval, ping_interval)
    }

    /// Looks at the links that are up, after a sleep that was meant to take `meant` and took `slept`.
    pub fn look(&mut self, now: Duration, (meant, slept): (Duration, Duration), links: &[Option<Moved>]) -> Silent {
        let Deadlines { link_silent, peer_lost, ping_interval, .. } = self.deadlines;
        if slept > meant + ping_interval {
            self.peer = 0;
            self.links.fill(0);
        }
        let newest = links.iter().flatten().map(|link| link.received).max().unwrap_or_default();
        let mut silent = Silent::default();
        for (number, (link, looks)) in links.iter().zip(&mut self.links).enumerate() {
            let Some(link) = link else { continue };
            // Offered bytes may be slow on the wire, and a ping waits behind them. As long as the link accepts them, it is alive.
            let is_behind_ours = !link.sent.is_zero() && link.received < link.sent + peer_lost;
            let limit = if is_behind_ours { peer_lost } else { link_silent };
            let is_silent = now.saturating_sub(link.received.max(link.sent)) >= limit;
            // Bytes arrived on another link later, so neither the peer nor this process was suspended.
            let is_behind = newest.saturating_sub(link.received) >= ping_interval;
            *looks = if is_silent && is_behind { *looks + 1 } else { 0 };
            if *looks >= Deadlines::LOOKS_MIN {
                silent.links.push(number);
            }
        }
        self.peer = if now.saturating_sub(newest) >= peer_lost { self.peer + 1 } else { 0 };
        silent.is_peer = self.peer >= Deadlines::LOOKS_MIN;
        silent
    }

    /// Forgets what was found about a link, because it is dialed again.
    pub fn forget(&mut self, link: usize) {
        self.links[link] = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEADLINES: Deadlines = Deadlines::DEFAULT;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Looks at a peer whose links receive the answer to a ping each second until their times of death, for a minute. The watcher
    /// stands still as told. Returns when which links, and the peer, were found silent.
    fn watch(deaths: &[u64], stops: &[(u64, u64)]) -> (Vec<(usize, Duration)>, Option<Duration>) {
        let mut watch = SilenceWatch::new(DEADLINES, deaths.len());
        let (mut now, mut silent) = (Duration::ZERO, Vec::new());
        let mut links: Vec<Option<Moved>> = vec![Some(Moved::default()); deaths.len()];
        // What has arrived while the watcher stood still is read after the first look that follows.
        let read = |now: Duration, links: &mut [Option<Moved>]| {
            for (link, death) in links.iter_mut().zip(deaths) {
                let last = Duration::from_secs(now.min(ms(*death)).as_secs());
                link.iter_mut().for_each(|link| link.received = last);
            }
        };
        while now < ms(60_000) {
            let meant = watch.pause(now, &links);
            let mut woken = now + meant;
            let stopped = stops.iter().find(|(from, _)| (now..woken).contains(&ms(*from)));
            match stopped {
                Some((from, lasting)) => woken = woken.max(ms(from + lasting)),
                None => read(woken, &mut links),
            }
            let found = watch.look(woken, (meant, woken - now), &links);
            now = woken;
            read(now, &mut links);
            if found.is_peer {
                return (silent, Some(now));
            }
            for number in found.links {
                silent.push((number, now));
                links[number] = None;
            }
        }
        (silent, None)
    }

    #[test]
    fn silent_links_and_peers_are_found_within_exact_times() {
        assert_eq!(watch(&[99_000; 3], &[]), (vec![], None));
        for death in (1_000..12_000).step_by(37) {
            let last = Duration::from_secs(death / 1000);
            // A link is silent two seconds after its last byte, and four looks find that.
            let (links, peer) = watch(&[99_000, death, 99_000], &[]);
            let [(1, at)] = links[..] else { panic!("{death}: {links:?}") };
            assert!(peer.is_none() && (last + ms(2_300)..=last + ms(2_600)).contains(&at), "{death}: {at:?}");
            let (links, peer) = watch(&[death; 3], &[]);
            assert!(links.is_empty(), "{death}: no link is worse than the others");
            let at = peer.unwrap();
            assert!((last + ms(5_300)..=last + ms(5_600)).contains(&at), "{death}: {at:?}");
        }
    }

    #[test]
    fn a_watcher_that_stood_still_accuses_nobody() {
        for from in (1_000..9_000).step_by(97) {
            for lasting in [1_500, 2_000, 4_900, 5_000, 7_000, 12_000, 40_000] {
                assert_eq!(watch(&[99_000; 3], &[(from, lasting)]), (vec![], None), "at {from} for {lasting}");
                // Again and again, with a look in between.
                let stops: Vec<(u64, u64)> = (0..8).map(|number| (from + number * (lasting + 150), lasting)).collect();
                assert_eq!(watch(&[99_000; 3], &stops), (vec![], None), "at {from} for {lasting}, eight times");
                // What is really silent is found soon after.
                let (_, peer) = watch(&[from; 3], &[(from, lasting)]);
                let at = peer.unwrap();
                assert!(at <= ms(from + lasting.max(5_000)) + ms(700), "at {from} for {lasting}: {at:?}");
            }
        }
    }
}
