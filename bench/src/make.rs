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
    #[command(flatten)]
    sizes: Sizes,
    /// Instead of a tree, write this number of tars with empty samples, to measure what names cost
    #[arg(long, value_name = "N", conflicts_with_all = ["mean_size", "log_normal"])]
    empty_in_tars: Option<u64>,
}

/// The sizes of samples. Together with a sample's number, they determine its content.
#[derive(Args, Clone, Copy)]
pub(crate) struct Sizes {
    /// Mean size in bytes; sizes vary from half to one and a half times that
    #[arg(long, default_value_t = 3000)]
    mean_size: u64,
    /// Draw sizes like those of photographs: log-normal, with this standard deviation of the
    /// logarithm
    #[arg(long, value_name = "SIGMA")]
    log_normal: Option<f64>,
}

impl Sizes {
    /// Returns the content of all samples, in the order of their numbers, without end.
    pub(crate) fn contents(self) -> impl Iterator<Item = Content> {
        let mut numbers = Numbers(3);
        std::iter::repeat_with(move || {
            let size = match self.log_normal {
                None => (self.mean_size / 2 + numbers.next() % (self.mean_size + 1)) as usize,
                Some(sigma) => {
                    // The sum of twelve uniform numbers is nearly normal.
                    let normal = (0..12).map(|_| (numbers.next() >> 11) as f64 / (1_u64 << 53) as f64).sum::<f64>() - 6.0;
                    (self.mean_size as f64 * (sigma * normal - sigma * sigma / 2.0).exp()) as usize
                }
            };
            let content = Content { size, numbers: numbers.clone() };
            numbers.skip(size.div_ceil(NUMBER_LEN) as u64);
            content
        })
    }
}

/// Bytes of a random number in a sample.
const NUMBER_LEN: usize = size_of::<u64>();

/// The content of a sample, which is computed again whenever it is needed.
#[derive(Clone)]
pub(crate) struct Content {
    size: usize,
    /// The generator as it was before the first byte.
    numbers: Numbers,
}

impl Content {
    fn bytes(&self) -> Vec<u8> {
        let mut numbers = self.numbers.clone();
        let mut bytes: Vec<u8> = (0..self.size.div_ceil(NUMBER_LEN)).flat_map(|_| numbers.next().to_le_bytes()).collect();
        bytes.truncate(self.size);
        bytes
    }

    /// Returns whether these are the sample's bytes: all of them, and no others.
    pub(crate) fn is(&self, bytes: &[u8]) -> bool {
        let mut numbers = self.numbers.clone();
        bytes.len() == self.size
            && bytes.chunks(NUMBER_LEN).all(|chunk| numbers.next().to_le_bytes().get(..chunk.len()) == Some(chunk))
    }
}

pub(crate) fn run(arguments: &Make) -> Result<(), Failure> {
    fs::create_dir(&arguments.folder)?;
    if let Some(tars) = arguments.empty_in_tars {
        return make_tars(arguments, tars.max(1));
    }
    for (number, content) in (0..arguments.samples).zip(arguments.sizes.contents()) {
        let folder = arguments.folder.join(format!("class-{:03}", number % 1000));
        if number < 1000 {
            fs::create_dir(&folder)?;
        }
        fs::write(folder.join(format!("{number}.bin")), content.bytes())?;
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn written_samples_have_the_content_that_is_computed_again_and_any_change_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        for (name, log_normal) in [("even", None), ("log-normal", Some(0.5))] {
            let arguments = Make {
                folder: folder.path().join(name),
                samples: 1200,
                sizes: Sizes { mean_size: 100, log_normal },
                empty_in_tars: None,
            };
            run(&arguments).unwrap();
            for (number, content) in (0..arguments.samples).zip(arguments.sizes.contents()) {
                let mut bytes = fs::read(arguments.folder.join(format!("class-{:03}/{number}.bin", number % 1000))).unwrap();
                assert!(content.is(&bytes), "{name} {number}");
                bytes.push(0);
                assert!(!content.is(&bytes), "{name} {number}: a byte too many");
                bytes.truncate(content.size - 1);
                assert!(!content.is(&bytes), "{name} {number}: a byte is missing");
                bytes[content.size / 2] ^= 1;
                assert!(!content.is(&bytes), "{name} {number}: a wrong byte");
            }
        }
    }
}
