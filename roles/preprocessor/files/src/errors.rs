// SPDX-License-Identifier: GPL-3.0-or-later
//! Refusals in the form of OpenAI's errors.

use hyper::StatusCode;

use crate::json::{self, Value};

/// One refusal. The message may name what the client sent wrongly, never what the prompt says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    pub status: StatusCode,
    pub kind: &'static str,
    pub code: &'static str,
    pub param: Option<&'static str>,
    pub message: String,
    /// Seconds after which the client may come again.
    pub retry_after: Option<u32>,
    pub allow: Option<&'static str>,
    /// What is still to come of the request is not read.
    pub closes: bool,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: &'static str, message: impl Into<String>) -> Self {
        ApiError {
            status,
            kind,
            code,
            param: None,
            message: message.into(),
            retry_after: None,
            allow: None,
            closes: false,
        }
    }

    /// 400: what the client sent cannot be served.
    pub fn invalid(code: &'static str, param: Option<&'static str>, message: impl Into<String>) -> Self {
        ApiError { param, ..Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", code, message) }
    }

    pub fn key_missing() -> Self {
        let message = "You did not provide an API key. Send it as: Authorization: Bearer KEY.";
        Self::new(StatusCode::UNAUTHORIZED, "invalid_request_error", "api_key_missing", message)
    }

    pub fn key_wrong() -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "invalid_request_error", "invalid_api_key", "Incorrect API key provided.")
    }

    pub fn unknown_path() -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", "unknown_url", "Unknown request URL.")
    }

    pub fn unknown_model(name: &str) -> Self {
        let shown: String = name.chars().filter(|character| !character.is_control()).take(128).collect();
        let message = format!("The model `{shown}` does not exist.");
        ApiError {
            param: Some("model"),
            ..Self::new(StatusCode::NOT_FOUND, "invalid_request_error", "model_not_found", message)
        }
    }

    pub fn method(allow: &'static str) -> Self {
        let message = format!("Only {allow} is allowed here.");
        ApiError {
            allow: Some(allow),
            ..Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", "method_not_supported", message)
        }
    }

    pub fn too_slow() -> Self {
        let message = "The request did not arrive in time.";
        ApiError {
            closes: true,
            ..Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", "request_timeout", message)
        }
    }

    pub fn body_too_large(most: usize) -> Self {
        let message = format!("The body is larger than {most} bytes.");
        ApiError {
            closes: true,
            ..Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", "body_too_large", message)
        }
    }

    pub fn media_type() -> Self {
        let message = "The body has to be JSON, with Content-Type: application/json and no Content-Encoding.";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", "unsupported_media_type", message)
    }

    pub fn prompt_too_long(tokens: usize, limit: usize) -> Self {
        let message = format!(
            "This model's maximum context length is {limit} tokens. Your prompt has {tokens}, which leaves no room for an answer."
        );
        Self::invalid("context_length_exceeded", Some("messages"), message)
    }

    pub fn overloaded() -> Self {
        let message = "Too many requests are being read. Try again later.";
        ApiError {
            retry_after: Some(1),
            closes: true,
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded", "preprocessor_overloaded", message)
        }
    }

    pub fn no_gateway() -> Self {
        let message = "No gateway can be reached. Try again later.";
        ApiError {
            retry_after: Some(1),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded", "no_gateway", message)
        }
    }

    pub fn gateway_failed() -> Self {
        Self::new(
            StatusCode::BAD_GATEWAY,
            "internal_error",
            "gateway_failed",
            "The gateway failed before it had answered.",
        )
    }

    pub fn gateway_late() -> Self {
        Self::new(StatusCode::GATEWAY_TIMEOUT, "internal_error", "gateway_late", "The gateway did not answer in time.")
    }

    pub fn answer_unreadable() -> Self {
        Self::new(
            StatusCode::BAD_GATEWAY,
            "internal_error",
            "answer_unreadable",
            "The engine's answer could not be read.",
        )
    }

    pub fn internal() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", "internal_error", "The preprocessor failed.")
    }

    /// The body.
    pub fn to_json(&self) -> String {
        let text = |text: &str| Value::String(text.to_owned());
        let members = vec![
            ("message".to_owned(), text(&self.message)),
            ("type".to_owned(), text(self.kind)),
            ("param".to_owned(), self.param.map_or(Value::Null, text)),
            ("code".to_owned(), text(self.code)),
        ];
        json::to_compact(&Value::Object(vec![("error".to_owned(), Value::Object(members))]))
    }
}

impl From<json::Refusal> for ApiError {
    fn from(refusal: json::Refusal) -> Self {
        ApiError::invalid(refusal.code, None, format!("The body is refused: {refusal}."))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_has_openais_form() {
        assert_eq!(
            ApiError::unknown_model("a\"\u{7}b").to_json(),
            r#"{"error":{"message":"The model `a\"b` does not exist.","type":"invalid_request_error","param":"model","code":"model_not_found"}}"#
        );
        let refusal = json::read(b"{", json::Limits::default()).unwrap_err();
        let body = ApiError::from(refusal).to_json();
        assert!(body.contains(r#""type":"invalid_request_error","param":null,"code":"invalid_json""#), "{body}");
    }
}
