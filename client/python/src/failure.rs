//! Errors as Python's exceptions. A failure about a file is an `OSError` with errno, text and path; the interpreter chooses the
//! subclass by the errno. Any other failure is `dayfly.Error`.

use dayfly_client::{ClientError, ViewError};
use dayfly_meta::path::display;
use dayfly_meta::text::without_os_numbers;
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyOSError};
use pyo3::prelude::*;

use crate::path::to_python;
use crate::wait;

create_exception!(dayfly, Error, PyException, "A failure that is not about a file.");

/// Returns the exception for a failure about a path.
pub(crate) fn at(py: Python<'_>, path: &[u8], error: ViewError) -> PyErr {
    let interruption = match &error {
        ViewError::Client(error) => wait::interruption(error),
        _ => wait::raised(),
    };
    if let Some(interruption) = interruption {
        return interruption;
    }
    let (errno, text) = match &error {
        ViewError::Client(ClientError::Path { errno, reason, .. }) => (*errno, reason.clone()),
        error => (error.errno(), error.to_string()),
    };
    os_error(py, errno, &text, path)
}

/// Returns an `OSError` about a path.
pub(crate) fn os_error(py: Python<'_>, errno: i32, text: &str, path: &[u8]) -> PyErr {
    match to_python(py, path) {
        Ok(path) => PyOSError::new_err((errno, without_os_numbers(text).into_owned(), path.unbind())),
        Err(error) => error,
    }
}

/// Returns the exception for a failure that names its file itself, or concerns none.
pub(crate) fn general(error: ClientError) -> PyErr {
    if let Some(interruption) = wait::interruption(&error) {
        return interruption;
    }
    match error {
        ClientError::Path { path, reason, errno } => PyOSError::new_err((errno, without_os_numbers(&reason).into_owned(), path)),
        error => Error::new_err(without_os_numbers(&error.to_string()).into_owned()),
    }
}

/// Returns the error for a path of another session's namespace or of none.
pub(crate) fn without_dataset(path: &[u8]) -> PyErr {
    Error::new_err(format!("'{}' is above all datasets, and not in one", display(path)))
}
