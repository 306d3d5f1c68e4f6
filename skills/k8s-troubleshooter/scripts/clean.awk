# The filter behind `clean`, after mask.awk: prints its input with credentials masked, and writes how many to TOLD.
# A line that may be of a key's body is held until it is known: one before an END, or one of several as long as those
# of keys are, was cut off from its BEGIN.

# open_key: 1 within the body of a key, 2 after its last line.
BEGIN { LONG = 60; MOST = 32768 }   # what is longer comes here with a byte more

function show(line) { gsub(/\001/, "***", line); print line }

# let_go(ENDED): prints the lines that are held, of those that are of a key one mask. ENDED: an END follows them.
function let_go(ended,   i, long, from, to) {
    from = ended ? n_held : n_held + 1
    to = n_held
    for (i = n_held; i; i--) if (length(held[i]) >= LONG) { if (!long++) to = i + 1; first_long = i }
    if (long > 1 || (long && ended)) from = first_long
    if (ended) to = n_held
    else if (long > 1) n_keys++
    for (i = 1; i <= n_held; i++) {
        if (i == from && !ended) show("\001")
        if (i < from || i > to) show(masked(held[i]))
    }
    n_held = 0
}

function last_word(line,   words) { return words[split(line, words, " ")] }

length($0) > MOST { $0 = substr($0, 1, MOST) " ... cut at " MOST " bytes" }
{
    in_key = open_key
    line = masked_keys($0)
    if (line != $0) {
        let_go(ends_only)
        if (!in_key || line != "\001") show(masked(line))
    } else if (in_key == 1 && line ~ /^ *([A-Z][A-Za-z-]+: .*)?$/) show(masked(line))
    else if (in_key == 1 && is_body(line)) open_key = length(line) >= LONG ? 1 : 2
    else if (in_key == 1 && length(word = last_word(line)) >= 40 && is_body(word)) show(masked(substr(line, 1, length(line) - length(word)) "\001"))
    else {
        open_key = 0
        if (is_body(line)) held[++n_held] = line
        else { let_go(0); show(masked(line)) }
    }
}

# counted(N, WHAT): "2 private keys"; nothing for none.
function counted(n, what) { return n ? n " " what (n == 1 ? "" : "s") : "" }

END {
    let_go(0)
    keys = counted(n_keys, "private key")
    values = counted(n_values, "value")
    if (told != "" && n_keys + n_values) print keys (keys != "" && values != "" ? " and " : "") values >told
}
