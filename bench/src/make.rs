//! Creates synthetic datasets as directory trees, which `tar` turns into archives.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::PathBuf;

use clap::Args;

use crate::measure::{Failure, Numbers};

/// Create a tree of samples in 1,000 directories, with incompressible content
#[derive(Args)]
pub(crate) struct Make {
    /// Folder to create; must not exist
    folder: PathBuf,
    /// Number of samples
    #[arg(long, default_value_t = 100_000)]
    samples: u64,
    /// Mean size in bytes; sizes vary from half to one and a half times that
    #[arg(long, default_value_t = 3000)]
    mean_size: u64,
    /// Draw sizes like those of photographs: log-normal, with this standard deviation of the
    /// logarithm
    #[arg(long, value_name = "SIGMA")]
    log_normal: Option<f64>,
    /// Instead of a tree, write this number of tars with empty samples, to measure what names cost
    #[arg(long, value_name = "N", conflicts_with_all = ["mean_size", "log_normal"])]
    empty_in_tars: Option<u64>,
}

pub(crate) fn run(arguments: &Make) -> Result<(), Failure> {
    fs::create_dir(&arguments.folder)?;
    if let Some(tars) = arguments.empty_in_tars {
        return make_tars(arguments, tars.max(1));
    }
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
                // The sum of twelve uniform numbers is nearly normal.
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

fn make_tars(arguments: &Make, tars: u64) -> Result<(), Failure> {
    for tar in 0..tars {
        let mut file = BufWriter::new(File::create(arguments.folder.join(format!("{tar:04}.tar")))?);
        for number in (0..arguments.samples).filter(|number| number % tars == tar) {
            file.write_all(&empty_member(&format!("class-{:04}/{number}.txt", number % 1000)))?;
        }
        file.write_all(&[0; 1024])?;
        file.flush()?;
    }
    Ok(())
}

/// The header of an empty file. A tar contains nothing else for such a file.
fn empty_member(name: &str) -> [u8; 512] {
    let mut block = [0; 512];
    block[..name.len()].copy_from_slice(name.as_bytes());
    block[100..108].copy_from_slice(b"0000644\0");
    block[124..136].copy_from_slice(b"00000000000\0");
    block[136..148].copy_from_slice(b"14000000000\0");
    block[148..157].copy_from_slice(b"        0");
    block[257..265].copy_from_slice(b"ustar\x0000");
    let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}
