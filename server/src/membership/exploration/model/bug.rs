//! The defects that the exploration must find.

/// A defect of the code around the rules. The exploration must find each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) enum Bug {
    /// Nodes carry out requests of old epochs.
    OldEpochs,
    /// A successor aborts whatever it finds.
    AbortsAll,
    /// A successor asks only itself how far stage-ins got.
    AsksItself,
    /// A server that returns keeps what is gone.
    KeepsWhatIsGone,
    /// A server that has returned does not look again for what appeared while it returned.
    LooksOnce,
    /// A coordinator does not ask a node again that has answered, been lost and returned.
    CountsOldAnswers,
    /// A coordinator lists its datasets to a server that knows a newer roster.
    ListsTooEarly,
    /// A coordinator goes on after another one took over.
    NeverStandsDown,
    /// A node asks an old coordinator for its datasets although it has heard of a new one.
    AsksOldCoordinator,
}

impl Bug {
    pub(in super::super) const ALL: [Self; 9] = [
        Self::OldEpochs,
        Self::AbortsAll,
        Self::AsksItself,
        Self::KeepsWhatIsGone,
        Self::LooksOnce,
        Self::CountsOldAnswers,
        Self::ListsTooEarly,
        Self::NeverStandsDown,
        Self::AsksOldCoordinator,
    ];
}
