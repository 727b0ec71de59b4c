//! Synthetic data sets, as directory trees; `tar` makes archives of them.

use std::fs;
use std::path::PathBuf;

use clap::Args;

use crate::Failure;
use crate::measure::Numbers;

/// Make a tree of samples in 1,000 directories, with incompressible content.
#[derive(Args)]
pub(crate) struct Make {
    /// Where; must not exist.
    folder: PathBuf,
    /// How many samples.
    #[arg(long, default_value_t = 100_000)]
    samples: u64,
    /// Mean size in bytes; sizes vary from half of it to one and a half.
    #[arg(long, default_value_t = 3000)]
    mean_size: u64,
    /// Sizes as those of photographs: log-normal, with this deviation of the logarithm.
    #[arg(long, value_name = "SIGMA")]
    log_normal: Option<f64>,
}

pub(crate) fn run(arguments: &Make) -> Result<(), Failure> {
    fs::create_dir(&arguments.folder)?;
    let mut numbers = Numbers(3);
    let mut content = Vec::new();
    for number in 0..arguments.samples {
        let folder = arguments.folder.join(format!("class-{:03}", number % 1000));
        if number < 1000 {
            fs::create_dir(&folder)?;
        }
        let size = match arguments.log_normal {
            None => (arguments.mean_size / 2 + numbers.next() % (arguments.mean_size + 1)) as usize,
            Some(sigma) => {
                // Twelve equal ones make one that is nearly normal.
                let normal = (0..12).map(|_| (numbers.next() >> 11) as f64 / (1_u64 << 53) as f64).sum::<f64>() - 6.0;
                (arguments.mean_size as f64 * (sigma * normal - sigma * sigma / 2.0).exp()) as usize
            }
        };
        content.clear();
        while content.len() < size {
            content.extend_from_slice(&numbers.next().to_le_bytes());
        }
        fs::write(folder.join(format!("{number}.bin")), &content[..size])?;
    }
    Ok(())
}
