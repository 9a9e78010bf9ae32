// SPDX-License-Identifier: GPL-3.0-or-later
//! Chat templates, rendered as `transformers` renders them with Jinja.
//!
//! The environment is that of `transformers.utils.chat_template_utils`: blocks trimmed and stripped, loop controls, the tag
//! `generation`, `raise_exception`, `strftime_now`, and a `tojson` that does not escape HTML. Values are printed as Python prints
//! them. How messages reach the template (content as text or as parts) is decided as vLLM decides it.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::machinery::ast::{Expr, Stmt};
use minijinja::machinery::{parse, WhitespaceConfig};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};

use crate::json;

/// Whether messages have their content as text or as a list of parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentFormat {
    Text,
    Parts,
}

/// The templates of one model: one for all, and maybe another for requests with tools.
pub struct ChatTemplate {
    environment: Environment<'static>,
    format: ContentFormat,
    tool_format: ContentFormat,
    has_tool_template: bool,
}

/// What a template renders.
pub struct Conversation<'request> {
    pub messages: Vec<json::Value>,
    pub tools: Option<json::Value>,
    pub add_generation_prompt: bool,
    pub continue_final_message: bool,
    /// Further variables: of the request, of the model's configuration.
    pub variables: Vec<(String, json::Value)>,
    pub named_tokens: &'request [(String, String)],
}

const PLAIN: &str = "chat";
const WITH_TOOLS: &str = "chat with tools";
const CONTINUE_MARK: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

impl ChatTemplate {
    /// Compile. `format` overrules what the template's text says.
    pub fn new(plain: &str, with_tools: Option<&str>, format: Option<ContentFormat>) -> Result<Self, String> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(|output: &mut Output, _state: &State, value: &Value| {
            let mut text = String::new();
            python_str(value, &mut text)?;
            output.write_str(&text).map_err(Error::from)
        });
        environment.add_filter("tojson", to_json);
        environment.add_filter("string", |value: Value| -> Result<String, Error> {
            let mut text = String::new();
            python_str(&value, &mut text)?;
            Ok(text)
        });
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message).with_source(Raised))
        });
        environment.add_function("strftime_now", |format: String| strftime(&format, seconds_now()));
        let plain = without_generation_tag(plain);
        let detect = |source: &str| format.unwrap_or_else(|| detect_format(source));
        let mut template = ChatTemplate {
            format: detect(&plain),
            tool_format: with_tools.map_or_else(|| detect(&plain), |source| detect(&without_generation_tag(source))),
            has_tool_template: with_tools.is_some(),
            environment,
        };
        template.environment.add_template_owned(PLAIN, plain).map_err(|error| error.to_string())?;
        if let Some(source) = with_tools {
            let source = without_generation_tag(source);
            template.environment.add_template_owned(WITH_TOOLS, source).map_err(|error| error.to_string())?;
        }
        Ok(template)
    }

    /// The form in which messages have to come.
    pub fn format(&self, has_tools: bool) -> ContentFormat {
        if has_tools {
            self.tool_format
        } else {
            self.format
        }
    }

    /// Render.
    pub fn render(&self, conversation: Conversation<'_>) -> Result<String, RenderError> {
        let Conversation {
            mut messages,
            tools,
            add_generation_prompt,
            continue_final_message,
            variables,
            named_tokens,
        } = conversation;
        if continue_final_message {
            mark_final_message(&mut messages)?;
        }
        let name = if self.has_tool_template && tools.is_some() { WITH_TOOLS } else { PLAIN };
        let mut context: Vec<(String, Value)> =
            named_tokens.iter().map(|(name, token)| (name.clone(), Value::from(token.as_str()))).collect();
        context.extend(variables.iter().map(|(name, value)| (name.clone(), to_template(value))));
        context.push(("messages".into(), messages.iter().map(to_template).collect()));
        context.push(("tools".into(), tools.as_ref().map_or(Value::from(()), to_template)));
        if !context.iter().any(|(name, _value)| name == "documents") {
            context.push(("documents".into(), Value::from(())));
        }
        context.push(("add_generation_prompt".into(), Value::from(add_generation_prompt)));
        let context: Value = context.into_iter().collect();
        let template = self.environment.get_template(name).map_err(RenderError::from)?;
        let rendered = template.render(context).map_err(RenderError::from)?;
        if continue_final_message {
            return cut_at_mark(rendered);
        }
        Ok(rendered)
    }
}

/// Why there is no text.
#[derive(Debug, PartialEq, Eq)]
pub enum RenderError {
    /// The template refuses the conversation; the message is meant for the client.
    Raised(String),
    /// The template does what this environment cannot do.
    Failed,
}

/// Marks an error as the template's own.
#[derive(Debug)]
struct Raised;

impl std::fmt::Display for Raised {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("raised by the template")
    }
}

impl std::error::Error for Raised {}

impl From<Error> for RenderError {
    fn from(error: Error) -> Self {
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            if cause.is::<Raised>() {
                return RenderError::Raised(error.detail().unwrap_or_default().to_owned());
            }
            source = cause.source();
        }
        RenderError::Failed
    }
}

/// Put a mark behind the text of the last message; what is rendered after it is cut off.
fn mark_final_message(messages: &mut [json::Value]) -> Result<(), RenderError> {
    const NO_TEXT: &str = "continue_final_message is set but there is no final message with text to continue";
    let no_text = || RenderError::Raised(NO_TEXT.to_owned());
    let content = messages.last_mut().and_then(|message| message.get_mut("content")).ok_or_else(no_text)?;
    let text = match content {
        json::Value::Array(parts) => {
            parts.iter_mut().rev().find_map(|part| part.get_mut("text")).ok_or_else(no_text)?
        }
        text => text,
    };
    match text {
        json::Value::String(text) => {
            text.push_str(CONTINUE_MARK);
            Ok(())
        }
        _ => Err(no_text()),
    }
}

fn cut_at_mark(mut rendered: String) -> Result<String, RenderError> {
    let place = rendered.rfind(CONTINUE_MARK.trim()).ok_or_else(|| {
        RenderError::Raised(
            "continue_final_message is set but the template does not keep the final message's text".to_owned(),
        )
    })?;
    let kept = if rendered[place..].starts_with(CONTINUE_MARK) {
        place
    } else {
        // The template strips messages; so the end of this one is stripped, too.
        rendered[..place].trim_end().len()
    };
    rendered.truncate(kept);
    Ok(rendered)
}

/// A value of a request as one of a template.
fn to_template(value: &json::Value) -> Value {
    match value {
        json::Value::Null => Value::from(()),
        json::Value::Bool(truth) => Value::from(*truth),
        json::Value::Integer(number) => Value::from(*number),
        json::Value::BigInteger(written) => written
            .parse::<i128>()
            .map_or_else(|_error| Value::from(written.parse::<f64>().unwrap_or(f64::INFINITY)), Value::from),
        json::Value::Float(number) => Value::from(*number),
        json::Value::String(text) => Value::from(text.as_str()),
        json::Value::Array(items) => Value::from(items.iter().map(to_template).collect::<Vec<Value>>()),
        json::Value::Object(members) => {
            members.iter().map(|(name, member)| (Value::from(name.as_str()), to_template(member))).collect()
        }
    }
}

/// A template's value as JSON, or why Python's `json.dumps` would refuse it.
fn from_template(value: &Value) -> Result<json::Value, Error> {
    Ok(match value.kind() {
        ValueKind::None => json::Value::Null,
        ValueKind::Bool => json::Value::Bool(value.is_true()),
        ValueKind::Number => match value.as_i64() {
            Some(number) if value.is_integer() => json::Value::Integer(number),
            _ if value.is_integer() => json::Value::BigInteger(value.to_string()),
            _ => json::Value::Float(f64::try_from(value.clone())?),
        },
        ValueKind::String => json::Value::String(value.as_str().unwrap_or_default().to_owned()),
        ValueKind::Map => {
            let mut members = Vec::new();
            for key in value.try_iter()? {
                let mut name = String::new();
                python_str(&key, &mut name)?;
                members.push((name, from_template(&value.get_item(&key)?)?));
            }
            json::Value::Object(members)
        }
        ValueKind::Seq | ValueKind::Iterable => {
            json::Value::Array(value.try_iter()?.map(|item| from_template(&item)).collect::<Result<_, _>>()?)
        }
        kind => {
            let message = format!("Object of type {kind} is not JSON serializable");
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
    })
}

/// The filter `tojson` of `transformers`: `json.dumps` with some of its options.
fn to_json(value: Value, options: Kwargs) -> Result<String, Error> {
    let mut style = json::Style::python();
    if options.has("ensure_ascii") {
        style.ensure_ascii = options.get("ensure_ascii")?;
    }
    if let Some(indent) = options.get::<Option<Value>>("indent")?.filter(|indent| !indent.is_none()) {
        style.item_separator = ",".into();
        style.indent = Some(match indent.as_usize() {
            Some(width) => " ".repeat(width.min(64)),
            None => indent.as_str().unwrap_or_default().to_owned(),
        });
    }
    if let Some(separators) = options.get::<Option<Value>>("separators")?.filter(|value| !value.is_none()) {
        style.item_separator = separators.get_item_by_index(0)?.to_string();
        style.name_separator = separators.get_item_by_index(1)?.to_string();
    }
    let mut value = from_template(&value)?;
    if options.get::<Option<bool>>("sort_keys")?.unwrap_or(false) {
        sort_names(&mut value);
    }
    options.assert_all_used()?;
    let mut out = String::new();
    json::write(&value, &style, &mut out);
    Ok(out)
}

fn sort_names(value: &mut json::Value) {
    match value {
        json::Value::Array(items) => items.iter_mut().for_each(sort_names),
        json::Value::Object(members) => {
            members.sort_by(|(left, _left), (right, _right)| left.cmp(right));
            members.iter_mut().for_each(|(_name, member)| sort_names(member));
        }
        _ => {}
    }
}

/// Python's `str()` of a value; nothing for one that is undefined.
fn python_str(value: &Value, out: &mut String) -> Result<(), Error> {
    match (value.kind(), value.as_str()) {
        (ValueKind::Undefined, _) => {}
        (_, Some(text)) => out.push_str(text),
        _ => python_repr(value, out)?,
    }
    Ok(())
}

/// Python's `repr()` of a value.
fn python_repr(value: &Value, out: &mut String) -> Result<(), Error> {
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number if !value.is_integer() => json::write_float(f64::try_from(value.clone())?, out),
        ValueKind::String => repr_of_text(value.as_str().unwrap_or_default(), out),
        ValueKind::Map => {
            out.push('{');
            for (index, key) in value.try_iter()?.enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                python_repr(&key, out)?;
                out.push_str(": ");
                python_repr(&value.get_item(&key)?, out)?;
            }
            out.push('}');
        }
        ValueKind::Seq => {
            out.push('[');
            for (index, item) in value.try_iter()?.enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                python_repr(&item, out)?;
            }
            out.push(']');
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

fn repr_of_text(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for character in text.chars() {
        match character {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            other if other == quote => out.extend(['\\', other]),
            other if (other as u32) < 0x20 || other == '\u{7f}' => out.push_str(&format!("\\x{:02x}", other as u32)),
            other => out.push(other),
        }
    }
    out.push(quote);
}

fn seconds_now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64)
}

/// `strftime` in UTC for the directives that templates use; an unknown directive stays as it is, as in glibc.
fn strftime(format: &str, seconds: i64) -> String {
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    let (days, second_of_day) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (hour, minute, second) = (second_of_day / 3600, second_of_day / 60 % 60, second_of_day % 60);
    let weekday = DAYS[days.rem_euclid(7) as usize];
    // Years from March, so that the leap day is the last: Howard Hinnant's days_from_civil turned around.
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let month_name = MONTHS[month as usize - 1];
    let before_month: i64 = (1..month).map(|month| days_of_month(month, is_leap)).sum();
    let twelve = if hour % 12 == 0 { 12 } else { hour % 12 };
    let mut out = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        match characters.next() {
            Some('Y') => out.push_str(&year.to_string()),
            Some('y') => out.push_str(&format!("{:02}", year.rem_euclid(100))),
            Some('m') => out.push_str(&format!("{month:02}")),
            Some('d') => out.push_str(&format!("{day:02}")),
            Some('e') => out.push_str(&format!("{day:2}")),
            Some('j') => out.push_str(&format!("{:03}", before_month + day)),
            Some('B') => out.push_str(month_name),
            Some('b' | 'h') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(weekday),
            Some('a') => out.push_str(&weekday[..3]),
            Some('H') => out.push_str(&format!("{hour:02}")),
            Some('I') => out.push_str(&format!("{twelve:02}")),
            Some('M') => out.push_str(&format!("{minute:02}")),
            Some('S') => out.push_str(&format!("{second:02}")),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('F') => out.push_str(&format!("{year}-{month:02}-{day:02}")),
            Some('T') => out.push_str(&format!("{hour:02}:{minute:02}:{second:02}")),
            Some('Z') => out.push_str("UTC"),
            Some('%') => out.push('%'),
            Some('-') => match characters.next() {
                Some('d') => out.push_str(&day.to_string()),
                Some('m') => out.push_str(&month.to_string()),
                Some('H') => out.push_str(&hour.to_string()),
                Some('I') => out.push_str(&twelve.to_string()),
                Some('M') => out.push_str(&minute.to_string()),
                other => out.extend(['%', '-'].into_iter().chain(other)),
            },
            other => out.extend(Some('%').into_iter().chain(other)),
        }
    }
    out
}

fn days_of_month(month: i64, is_leap: bool) -> i64 {
    match month {
        2 => 28 + i64::from(is_leap),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// `{% generation %}` marks what the assistant says and prints its body; a `with` block does the same, scope and all.
fn without_generation_tag(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let inner = &tag[2..end];
        let word = inner.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        let replacement = match word {
            "generation" => "with",
            "endgeneration" => "endwith",
            _ => "",
        };
        if replacement.is_empty() {
            out.push_str("{%");
            rest = &tag[2..];
        } else {
            out.push_str("{%");
            out.push_str(&inner.replacen(word, replacement, 1));
            out.push_str("%}");
            rest = &tag[end + 2..];
        }
    }
    out.push_str(rest);
    out
}

/// Whether the template goes through the parts of a message's content, as vLLM finds out from the syntax tree: is there a loop
/// over `content` of something that a loop over `messages`, or over a variable set from it, yields?
fn detect_format(source: &str) -> ContentFormat {
    let whitespace = WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };
    let Ok(root) = parse(source, PLAIN, SyntaxConfig, whitespace) else {
        return ContentFormat::Text;
    };
    let mut found = Loops::default();
    found.collect(&root);
    // A target that is no plain name ends vLLM's search with its default, text.
    find_content_loop(&found).unwrap_or(ContentFormat::Text)
}

#[derive(Default)]
struct Loops<'tree> {
    sets: Vec<(&'tree Expr<'tree>, &'tree Expr<'tree>)>,
    loops: Vec<(&'tree Expr<'tree>, &'tree Expr<'tree>)>,
}

impl<'tree> Loops<'tree> {
    fn collect_all(&mut self, statements: &'tree [Stmt<'tree>]) {
        statements.iter().for_each(|statement| self.collect(statement));
    }

    fn collect(&mut self, statement: &'tree Stmt<'tree>) {
        match statement {
            Stmt::Template(node) => self.collect_all(&node.children),
            Stmt::ForLoop(node) => {
                self.loops.push((&node.target, &node.iter));
                self.collect_all(&node.body);
                self.collect_all(&node.else_body);
            }
            Stmt::IfCond(node) => {
                self.collect_all(&node.true_body);
                self.collect_all(&node.false_body);
            }
            Stmt::WithBlock(node) => self.collect_all(&node.body),
            Stmt::Set(node) => self.sets.push((&node.target, &node.expr)),
            Stmt::SetBlock(node) => self.collect_all(&node.body),
            Stmt::AutoEscape(node) => self.collect_all(&node.body),
            Stmt::FilterBlock(node) => self.collect_all(&node.body),
            Stmt::Macro(node) => self.collect_all(&node.body),
            Stmt::CallBlock(node) => self.collect_all(&node.macro_decl.body),
            _ => {}
        }
    }
}

fn find_content_loop(found: &Loops<'_>) -> Option<ContentFormat> {
    let mut names = vec!["messages"];
    let mut next = 0;
    while let Some(&name) = names.get(next) {
        next += 1;
        for (target, expression) in &found.sets {
            if reaches(expression, name, None) {
                let target = plain_name(target)?;
                if !names.contains(&target) {
                    names.push(target);
                }
            }
        }
    }
    let mut items = Vec::new();
    for (target, iterated) in &found.loops {
        if names.iter().any(|name| reaches(iterated, name, None)) {
            items.push(plain_name(target)?);
        }
    }
    for (target, iterated) in &found.loops {
        if items.iter().any(|name| reaches(iterated, name, Some("content"))) {
            return plain_name(target).map(|_name| ContentFormat::Parts);
        }
    }
    Some(ContentFormat::Text)
}

fn plain_name<'tree>(expression: &'tree Expr<'tree>) -> Option<&'tree str> {
    match expression {
        Expr::Var(variable) => Some(variable.id),
        _ => None,
    }
}

/// Whether an expression is the variable, or its attribute, or a slice, filter or test of that.
fn reaches(expression: &Expr<'_>, name: &str, attribute: Option<&str>) -> bool {
    let is_variable = |expression: &Expr<'_>| matches!(expression, Expr::Var(variable) if variable.id == name);
    match (expression, attribute) {
        (Expr::Filter(filter), _) => filter.expr.as_ref().is_some_and(|inner| reaches(inner, name, attribute)),
        (Expr::Test(test), _) => reaches(&test.expr, name, attribute),
        (Expr::Slice(slice), _) => reaches(&slice.expr, name, attribute),
        (Expr::GetAttr(access), Some(attribute)) => is_variable(&access.expr) && access.name == attribute,
        (Expr::GetItem(access), Some(attribute)) => {
            is_variable(&access.expr)
                && matches!(&access.subscript_expr, Expr::Const(constant) if constant.value.as_str() == Some(attribute))
        }
        (other, None) => is_variable(other),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(role: &str, content: &str) -> json::Value {
        json::read(format!(r#"{{"role":{role:?},"content":{content:?}}}"#).as_bytes(), json::Limits::default())
            .unwrap()
            .root
    }

    fn render_with(template: &str, messages: Vec<json::Value>, continues: bool) -> Result<String, RenderError> {
        ChatTemplate::new(template, None, None).unwrap().render(Conversation {
            messages,
            tools: None,
            add_generation_prompt: !continues,
            continue_final_message: continues,
            variables: vec![("thinking".into(), json::Value::Bool(true))],
            named_tokens: &[("bos_token".into(), "<s>".into())],
        })
    }

    fn render(template: &str) -> Result<String, RenderError> {
        render_with(template, vec![message("user", "Hello"), message("assistant", " Hi ")], false)
    }

    #[test]
    fn the_environment_is_that_of_transformers() {
        for (template, expected) in [
            ("{{ bos_token }}{% for m in messages %}\n{{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}", "<s>user: Hello\nassistant: Hi\n"),
            ("{{ messages[0] | tojson }}", r#"{"role": "user", "content": "Hello"}"#),
            ("{{ '<é>' | tojson }} {{ 'é' | tojson(ensure_ascii=true) }}", "\"<é>\" \"\\u00e9\""),
            ("{{ [1, 2.0, true, none] }} {{ true }} {{ none }} {{ 1.0 }}", "[1, 2.0, True, None] True None 1.0"),
            ("{{ messages[1].content.strip() }}|{{ 'a,b'.split(',')[-1] }}", "Hi|b"),
            ("{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "02"),
            ("{%- generation %}  a{%- endgeneration -%}  b", "  ab"),
            ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
            ("{% if thinking is defined and thinking %}t{% endif %}{% if tools %}x{% endif %}{{ nothing }}", "t"),
            ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('a') }}", "[a]"),
            ("{% if add_generation_prompt %}<assistant>\n{% endif %}", "<assistant>\n"),
        ] {
            assert_eq!(render(template), Ok(expected.to_owned()), "{template}");
        }
        assert_eq!(
            render("{{ raise_exception('Roles must alternate') }}"),
            Err(RenderError::Raised("Roles must alternate".into()))
        );
        assert_eq!(render("{{ undefined_thing.x }}"), Err(RenderError::Failed));
        assert!(ChatTemplate::new("{% if %}", None, None).is_err());
    }

    #[test]
    fn strftime_knows_the_calendar() {
        assert_eq!(
            strftime("%d %b %Y|%A|%j|%H:%M:%S|%I %p|%-d|%%|%F", 1_709_210_096),
            "29 Feb 2024|Thursday|060|12:34:56|12 PM|29|%|2024-02-29"
        );
        assert_eq!(strftime("%Y-%m-%d %a", 0), "1970-01-01 Thu");
        assert_eq!(strftime("%Q%", 0), "%Q%");
    }

    #[test]
    fn the_format_of_content_is_detected() {
        for (template, expected) in [
            ("{% for m in messages %}{{ m['content'] }}{% endfor %}", ContentFormat::Text),
            ("{% for m in messages %}{% for c in m['content'] %}{{ c.text }}{% endfor %}{% endfor %}", ContentFormat::Parts),
            ("{% for m in messages[1:] %}{% for c in m.content | list %}x{% endfor %}{% endfor %}", ContentFormat::Parts),
            ("{% set rest = messages[1:] %}{% for m in rest %}{% if 1 %}{% for c in m.content %}x{% endfor %}{% endif %}{% endfor %}", ContentFormat::Parts),
            ("{% for m in others %}{% for c in m.content %}x{% endfor %}{% endfor %}", ContentFormat::Text),
            ("{% for m in messages %}{% for c in m.other %}x{% endfor %}{% endfor %}", ContentFormat::Text),
            ("{% for a, b in messages %}{% for c in a.content %}x{% endfor %}{% endfor %}", ContentFormat::Text),
        ] {
            assert_eq!(detect_format(template), expected, "{template}");
        }
    }

    #[test]
    fn a_final_message_can_be_continued() {
        let messages = || vec![message("user", "Hello"), message("assistant", "Well, ")];
        let kept = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}";
        assert_eq!(render_with(kept, messages(), true), Ok("<user>Hello</>\n<assistant>Well, ".into()));
        let stripped = "{% for m in messages %}<{{ m.role }}>{{ m.content.strip() }}</>\n{% endfor %}";
        assert_eq!(render_with(stripped, messages(), true), Ok("<user>Hello</>\n<assistant>Well,".into()));
        assert!(render_with("nothing", messages(), true).is_err());
        assert!(render_with(kept, vec![], true).is_err());
    }
}
