# When a CronJob was last due, by its schedule. Plain awk, as lib.awk.

# civil(DAYS): sets year, month and day of that many days after 1970-01-01.
function civil(days,   era, doe, yoe, doy, mp) {
    days += 719468
    era = int(days / 146097)
    doe = days - era * 146097
    yoe = int((doe - int(doe / 1460) + int(doe / 36524) - int(doe / 146096)) / 365)
    doy = doe - (365 * yoe + int(yoe / 4) - int(yoe / 100))
    mp = int((5 * doy + 2) / 153)
    day = doy - int((153 * mp + 2) / 5) + 1
    month = mp < 10 ? mp + 3 : mp - 9
    year = yoe + era * 400 + (month <= 2)
}

# moment(T): 2026-11-21T02:51:08Z of seconds since 1970.
function moment(t,   days) {
    days = int(t / 86400)
    civil(days)
    t -= days * 86400
    return sprintf("%04d-%02d-%02dT%02d:%02d:%02dZ", year, month, day, int(t / 3600), int(t % 3600 / 60), t % 60)
}

# cron_field(TEXT, NAME, LOW, HIGH, NAMES): puts what TEXT allows into due[NAME, n]; 0 when it cannot be read.
function cron_field(text, name, low, high, names,   parts, n_parts, i, step, from, to, ends, n) {
    for (n = low; n <= high; n++) delete due[name, n]
    n_parts = split(toupper(text), parts, ",")
    for (i = 1; i <= n_parts; i++) {
        step = 0
        if (match(parts[i], /\/[0-9]+$/)) { step = substr(parts[i], RSTART + 1) + 0; if (!step) return 0; parts[i] = substr(parts[i], 1, RSTART - 1) }
        if (parts[i] == "*" || parts[i] == "?") { from = low; to = high }
        else {
            n = split(parts[i], ends, "-")
            if (n < 1 || n > 2) return 0
            from = cron_number(ends[1], low, names)
            to = n == 2 ? cron_number(ends[2], low, names) : step ? high : from
            if (from < low || to > high || to < from) return 0
        }
        for (n = from; n <= to; n += step ? step : 1) due[name, n] = 1
    }
    return 1
}

function cron_number(word, low, names,   at) {
    if (word ~ /^[0-9]+$/) return word + 0
    at = word == "" ? 0 : index(names, word)
    return at && length(word) == 3 ? low + (at - 1) / 3 : -1
}

# last_due(SCHEDULE, T): the last moment up to T that the schedule names, T's own zone; 0 when none was in a year, or
# when the schedule cannot be read.
function last_due(schedule, t,   field, n, days, hour, minute, first, d, any_dom, any_dow) {
    if (schedule ~ /^@/) schedule = schedule == "@hourly" ? "0 * * * *" : schedule ~ /^@(daily|midnight)$/ ? "0 0 * * *" : schedule == "@weekly" ? "0 0 * * 0" : schedule == "@monthly" ? "0 0 1 * *" : schedule ~ /^@(yearly|annually)$/ ? "0 0 1 1 *" : ""
    n = split(schedule, field, " ")
    if (n != 5) return 0
    if (!cron_field(field[1], "minute", 0, 59, "") || !cron_field(field[2], "hour", 0, 23, "") || !cron_field(field[3], "dom", 1, 31, "")) return 0
    if (!cron_field(field[4], "month", 1, 12, "JANFEBMARAPRMAYJUNJULAUGSEPOCTNOVDEC") || !cron_field(field[5], "dow", 0, 6, "SUNMONTUEWEDTHUFRISAT")) return 0
    any_dom = field[3] ~ /^[*?]/
    any_dow = field[5] ~ /^[*?]/
    first = int(t / 86400)
    for (days = first; days > first - 366; days--) {
        civil(days)
        if (!(("month", month) in due)) continue
        d = ("dom", day) in due
        n = ("dow", (days + 4) % 7) in due
        if (!(any_dom || any_dow ? d && n : d || n)) continue
        for (hour = 23; hour >= 0; hour--) {
            if (!(("hour", hour) in due)) continue
            for (minute = 59; minute >= 0; minute--)
                if ((("minute", minute) in due) && days * 86400 + hour * 3600 + minute * 60 <= t) return days * 86400 + hour * 3600 + minute * 60
        }
    }
    return 0
}
