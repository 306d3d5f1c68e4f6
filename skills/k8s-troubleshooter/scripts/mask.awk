# Masks what looks like a credential: within its line, within its value, never a line more. Plain awk, as lib.awk.
# A mask is \001 until it is printed as ***: what is read here holds no control characters but newline and tab.

BEGIN {
    DASHES = "----* ?"
    KEY = "[A-Z0-9 ]*PRIVATE KEY[A-Z ]*"
    TOKEN = "[A-Za-z0-9+/=._~-]"
    NAMED = "(passw(or)?d|passphrase|secret|token|api[_-]?key|access[_-]?key|credentials?)[a-z0-9_-]*\\\\?[\"']?$"
}

# past(TEXT): what follows the last match and the five dashes behind it.
function past(text,   i) {
    text = substr(text, RSTART + RLENGTH)
    for (i = 0; i < 5 && text ~ /^-/; i++) text = substr(text, 2)
    return text
}

# masked_keys(LINE): each private key within the line, to its end, or to the end of the tabbed value it is in. A body
# whose beginning is elsewhere is masked up to the end that stands here.
function masked_keys(line,   out, rest, stop, whole, end, at) {
    while (match(line, DASHES "BEGIN " KEY)) {
        out = out substr(line, 1, RSTART - 1) "\001"
        n_keys++
        rest = past(line)
        stop = index(rest, "\t")
        whole = stop ? substr(rest, 1, stop - 1) : rest
        open_key = 0
        if (match(whole, DASHES "END " KEY)) line = past(rest)
        else {
            end = whole ~ /"$/ ? "\"" : ""
            open_key = end == "" && !stop
            line = end (stop ? substr(rest, stop) : "")
        }
    }
    line = out line
    ends_only = 0
    if (match(line, DASHES "END " KEY)) {
        # Backwards over the body: a pattern that begins with it would be tried at each character of a long line.
        for (at = RSTART; at > 1 && substr(line, at - 1, 1) ~ /[A-Za-z0-9+\/=\\]/; at--) ;
        n_keys += !in_key
        ends_only = !in_key
        line = substr(line, 1, at - 1) "\001" past(line)
        open_key = 0
    }
    return line
}

# is_body(LINE): whether it is one line of a key in base64, and nothing else.
function is_body(line) { return line ~ /^[ ]*[A-Za-z0-9+\/=]+[ ]*$/ && line ~ /[A-Za-z0-9+\/=][A-Za-z0-9+\/=][A-Za-z0-9+\/=][A-Za-z0-9+\/=]/ }

# value_at(LINE): where the value begins of what is called a password, a token and so on; its name, and the mark
# between them, go to value_name. 0 when there is none. Only as much is read before a mark as a name has.
function value_at(line,   from, rest, at, name) {
    from = 1
    rest = line
    while (match(rest, /[:=]/)) {
        at = from + RSTART - 1
        rest = substr(rest, RSTART + 1)
        from = at + 1
        name = tolower(substr(line, at > 100 ? at - 100 : 1, at > 100 ? 100 : at - 1))
        if (name !~ NAMED) continue
        value_name = name substr(line, at, 1)
        return match(rest, /^ *\\?["']?/) && RLENGTH > 0 ? from + RLENGTH : from
    }
    return 0
}

function masked_values(line,   out, at) {
    while (at = value_at(line)) {
        out = out substr(line, 1, at - 1)
        line = substr(line, at)
        if (match(line, /^[^] \t",;&\\{[\001]+/)) { out = out "\001"; n_values++; line = substr(line, RLENGTH + 1) }
    }
    return out line
}

# masked_tokens(LINE): JSON web tokens: eyJ and more, a dot, and the rest. A run without a dot is passed over at once.
function masked_tokens(line,   out, at) {
    while (at = index(line, "eyJ")) {
        out = out substr(line, 1, at - 1)
        line = substr(line, at)
        match(line, /^[A-Za-z0-9_.-]+/)
        if (index(substr(line, 1, RLENGTH), ".") > 7) { out = out "\001"; n_values++ }
        else out = out substr(line, 1, RLENGTH)
        line = substr(line, RLENGTH + 1)
    }
    return out line
}

# masked_words(LINE): what is a credential by its form alone.
function masked_words(line,   low, out, at) {
    n_values += gsub(/:\/\/[^\/@ "\001]+@/, "://\001@", line)
    line = masked_tokens(line)
    n_values += gsub(/A[KS]IA[0-9A-Z][0-9A-Z][0-9A-Z][0-9A-Z][0-9A-Z][0-9A-Z][0-9A-Z][0-9A-Z][0-9A-Z][0-9A-Z][0-9A-Z][0-9A-Z][0-9A-Z][0-9A-Z][0-9A-Z][0-9A-Z]+/, "\001", line)
    low = tolower(line)
    while (match(low, "(bearer|basic) " TOKEN TOKEN TOKEN TOKEN TOKEN TOKEN TOKEN TOKEN "+")) {
        at = RSTART + (substr(low, RSTART, 2) == "be" ? 7 : 6)
        out = out substr(line, 1, at - 1) "\001"
        n_values++
        line = substr(line, RSTART + RLENGTH)
        low = substr(low, RSTART + RLENGTH)
    }
    return out line
}

function masked(line) { return masked_values(masked_words(line)) }
