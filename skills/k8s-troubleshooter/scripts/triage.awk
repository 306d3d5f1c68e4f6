# Reads what incident_triage.sh collected, one tagged record a line (templates/*.gotmpl say which), and prints the triage.
# Pods come last: whatever explains a pod is known when its line is read.

BEGIN {
    FS = "\t"
    MOST_SYMPTOMS = 20; MOST_OBJECTS = 6; MOST_EVENTS = 12; MOST_DETAILS = 3
    kubectl = ENVIRON["KUBECTL"]
    split("certificate control-plane node-not-ready namespace-terminating oom-killed crash-loop-back-off image-pull-back-off missing-config storage pod-pending admission-denied quota-exceeded pod-evicted cpu-throttling probe-failure job-failed helm-release rollout-stuck service-unreachable ingress-5xx autoscaler", order, " ")
    for (i in order) rank[order[i]] = i + 0
    focus = kind_of(focus)
    EXPIRED = "x509:|certificate (has expired|is not valid|signed by unknown)"
}

# kind_of(REF): deploy/x, deployments/x and Deployment/x are all deployment/x.
function kind_of(ref,   cut, kind) {
    cut = index(ref, "/")
    if (!cut) return ""
    kind = tolower(substr(ref, 1, cut - 1))
    sub(/s$/, "", kind)
    if (kind == "deploy") kind = "deployment"
    if (kind == "st") kind = "statefulset"
    if (kind == "d") kind = "daemonset"
    if (kind == "po") kind = "pod"
    if (kind == "no") kind = "node"
    if (kind == "svc") kind = "service"
    if (kind == "pvc") kind = "persistentvolumeclaim"
    if (kind == "hpa") kind = "horizontalpodautoscaler"
    if (kind == "ing" || kind == "ingresse") kind = "ingress"
    if (kind == "cj") kind = "cronjob"
    if (kind == "ro") kind = "rollout"
    if (kind == "n") kind = "namespace"
    return kind substr(ref, cut)
}

# add: OBJECT of WL shows SYM. WHAT is one line that names the evidence; ON is a node or "".
function add(sym, ns, wl, object, on, restarts, last, what,   g, gist) {
    g = sym SUBSEP ns SUBSEP wl
    if (!(g in count)) {
        groups[++n_groups] = g
        g_sym[g] = sym; g_ns[g] = ns; g_wl[g] = wl; first[g] = object
        by_symptom[sym]++
        has_symptom[ns, wl] = 1
    }
    gist = what
    gsub(/[0-9]+/, "", gist)
    if (!((g, gist) in known_detail) && n_details[g] < MOST_DETAILS) { known_detail[g, gist] = 1; details[g, ++n_details[g]] = clip(what, 300) }
    if ((g, object) in known) return
    known[g, object] = 1
    if (++count[g] <= MOST_OBJECTS) objects[g] = objects[g] (count[g] > 1 ? " " : "") object
    g_restarts[g] += restarts
    if (epoch(last) > epoch(g_last[g])) g_last[g] = last
    if (on != "" && !((g, on) in known_node)) {
        known_node[g, on] = 1
        if (++n_nodes[g] <= MOST_OBJECTS) g_nodes[g] = g_nodes[g] (n_nodes[g] > 1 ? " " : "") on
    }
    if (kind_of(wl) == focus || kind_of(object) == focus) { in_focus[g] = 1; n_focus++ }
    if (container != "") g_container[g] = container
    if (rank[sym] <= rank["helm-release"]) hit(ns, wl)
}

function hit(ns, wl) {
    spread(sick_ns, ns, "ns")
    if (wl !~ /^(Node|Namespace|API server)/) spread(sick_wl, ns "/" wl, "wl")
}

function spread(set, key, name) {
    if (key == "" || key in set) return
    set[key] = 1
    n_sick[name]++
}

function sick(ns, wl, pod, on) {
    if ((ns, pod) in sick_pod) return
    sick_pod[ns, pod] = 1
    n_sick["pods"]++
    of_workload[ns, wl]++
    hit(ns, wl)
    spread(sick_node, on, "nodes")
    if (on != "") a_node = on
}

# refusal(TEXT): which symptom it is that the API server would not create an object.
function refusal(low) {
    if (low ~ EXPIRED) return "certificate"
    if (low ~ /exceeded quota|must specify|(maximum|minimum) (cpu|memory)|limitrange/) return "quota-exceeded"
    return "admission-denied"
}

function recent(t) { return t == "" || now - epoch(t) <= since }

$1 == "F" { fates[++n_fates] = $3; fate_of[$2] = $3; command[n_fates] = $4; why[n_fates] = $5; hidden[n_fates] = $6; next }

$1 == "K" { if ($2 ~ /^\[-\]/) add("control-plane", "", "API server", "check/" substr($2, 4), "", 0, "", "/readyz says: " $2); next }

$1 == "N" { subject = "N"; node = $2; if ($4 != "") cordoned = cordoned " " node; next }
$1 == "Y" { subject = "Y"; name = $2; if (scope == "*" || scope == name) { leaving[++n_leaving] = name; leaves_at[name] = $3 } next }

# What an event is about is known when the pods are: here is kept what explains them.
$1 == "E" {
    if (!recent($8)) next
    n_raw++
    e_ns[n_raw] = $2; e_reason[n_raw] = name_of($4); e_kind[n_raw] = name_of($5); e_name[n_raw] = name_of($6)
    e_times[n_raw] = $7; e_at[n_raw] = $8; e_says[n_raw] = text = plain($9)
    at = $2 SUBSEP e_name[n_raw]
    reason = e_reason[n_raw]
    if (reason == "Unhealthy") probe[at] = text
    if (tolower(text) ~ /liveness probe failed/) liveness[at] = text
    if (reason ~ /^(FailedMount|FailedAttachVolume|FailedMapVolume)$/) mount[at] = text
    if (reason == "FailedCreatePodSandBox") sandbox[at] = text
    next
}

$1 == "W" {
    subject = "W"; kind = $2; ns = $3; name = $4
    desired = $6 + 0; ready = $7 + 0; updated = $8 + 0
    if (!desired) at_zero[ns, name] = 1
    if (desired > ready && now - epoch($5) > 60) {
        lagging[++n_lagging] = ns SUBSEP kind "/" name
        lag_text[n_lagging] = ready " of " desired " ready, " updated " updated" ($9 == "" ? "" : ", " $9)
    }
    next
}

$1 == "J" { subject = "J"; ns = $2; name = $3; hook = plain($7); owner = name_of($8); failed = $5 + 0; job_owner[ns, name] = owner; next }
$1 == "H" { subject = "H"; ns = $2; name = $3; target = $4; least = $5 + 0; most = $6 + 0; next }
$1 == "B" { subject = ""; judge_cron_job($2, $3, $4, plain($5), $6, $7, $8, $9 + 0, plain($10), $11); next }
$1 == "X" {
    subject = "X"; kind = $2; ns = $3; name = $4; young = now - epoch($5) <= 60
    if ($6 == "" && !young) add("ingress-5xx", ns, kind "/" name, kind "/" name, "", 0, "", "no gateway has taken it: its parentRefs name none that admits it")
    next
}
$1 == "U" { use[$2, $3, $4] = $5; next }

$1 == "c" {
    type = $2; status = $3; reason = plain($4); text = plain($5)
    if (subject == "N") {
        if (unwell(type, status)) {
            add("node-not-ready", "", "Node/" node, "Node/" node, node, 0, $6, type "=" status " since " $6 ", " reason ": " text)
            spread(sick_node, node, "nodes")
            # A node may be told to be ill and still run what it has: only these explain its pods.
            if (type ~ /^Ready$|Pressure$|^NetworkUnavailable$/) bad_node[node] = 1
        }
    }
    if (subject == "Y" && status == "True") leaves_why[name] = leaves_why[name] "; " type ": " text
    if (subject == "X" && !young && (type == "PartiallyInvalid" ? status == "True" : type ~ /^(Accepted|ResolvedRefs|Programmed)$/ && status != "True")) {
        add("ingress-5xx", ns, kind "/" name, kind "/" name, "", 0, $6 ~ /^1970/ ? "" : $6, type "=" status " " reason ": " text)
    }
    if (subject == "W") {
        if (type == "ReplicaFailure" && status == "True") add(refusal(tolower(text)), ns, kind "/" name, kind "/" name, "", 0, $6, "Error creating: " text)
        if (type == "Progressing" && reason == "ProgressDeadlineExceeded") stuck[ns, kind "/" name] = reason ": " text
    }
    if (subject == "J" && type == "Failed" && status == "True" && recent($6)) {
        if (hook != "") add("helm-release", ns, "Job/" name, "Job/" name, "", failed, $6, "helm hook " hook " failed: " reason ": " text)
        else add("job-failed", ns, owner == "" ? "Job/" name : owner, "Job/" name, "", failed, $6, reason ": " text)
    }
    if (subject == "H") {
        if (type ~ /^(ScalingActive|AbleToScale)$/ && status == "False" && reason != "ScalingDisabled") add("autoscaler", ns, target, "HorizontalPodAutoscaler/" name, "", 0, $6, type "=False " reason ": " text)
        else if (type == "ScalingLimited" && status == "True" && reason == "TooManyReplicas" && least < most) add("autoscaler", ns, target, "HorizontalPodAutoscaler/" name, "", 0, $6, "at its maximum of " most " replicas: " text)
    }
    if (subject == "P") {
        if (type == "PodScheduled" && status == "False") { unscheduled = text; unscheduled_at = $6 }
        if (type == "Ready") ready_at = $6
        if (type == "Initialized" && status == "False") waits_from = $6
    }
    next
}

$1 == "G" {
    if ($4 == "Lost") add("storage", $2, "PersistentVolumeClaim/" $3, "PersistentVolumeClaim/" $3, "", 0, "", "the claim is Lost: its volume is gone")
    else if ($4 == "Pending") { waits[$2, $3] = 1; pvcs[++n_pvcs] = $2 SUBSEP $3; pvc_text[n_pvcs] = "Pending for " age(now - epoch($6)) ", storage class " ($5 == "" ? "none named" : $5) }
    next
}
$1 == "Q" { if ($5 != "" && quantity($5) > 0 && quantity($6) >= quantity($5)) full[++n_full] = $2 "/" $3 " " $4 " " $6 " of " $5; next }
$1 == "S" { exists[$2, $3] = 1; if ($5 != "" && $4 != "ExternalName" && now - epoch($6) > 60) services[++n_services] = $2 SUBSEP $3; next }
$1 == "T" { up[$2, $3] += gsub(/1/, "1", $4); down[$2, $3] += gsub(/0/, "0", $4); next }
$1 == "I" { backends[++n_backends] = $2 SUBSEP $3 SUBSEP $4 SUBSEP $5 SUBSEP ($6 == "" ? "Ingress" : $6) SUBSEP ($7 == "" ? $2 : $7); next }

$1 == "D" { finish_pod(); dns = 1; next }
$1 == "P" {
    finish_pod()
    subject = "P"; p_ns = $2; pod = $3; phase = $4; p_node = $5; created = $6; p_owner = name_of($7); deleted = $8; p_reason = plain($9); p_text = plain($10)
    unscheduled = ""; ready_at = ""; waits_from = ""; n_c = 0
    split("", limit); split("", cpu_limit); split("", sidecar)
    wl = workload($7, pod, $11)
    if ($11 != "" && p_owner ~ /^ReplicaSet\//) rollout_of[p_ns, p_owner] = $11
    if (p_owner ~ /^Job\// && job_owner[p_ns, substr(p_owner, 5)] != "") wl = job_owner[p_ns, substr(p_owner, 5)]
    workload_of[p_ns, pod] = wl
    if (!dns) n_pods++
    total[p_ns, wl]++
    next
}
$1 == "C" { for (i = 2; i <= 15; i++) c[n_c, i] = $i; n_c++; next }
$1 == "L" { limit[$2] = $3; cpu_limit[$2] = $6; next }
$1 == "A" { sidecar[$2] = 1; next }

function found(sym, restarts, last, what) {
    add(sym, p_ns, wl, "Pod/" pod, p_node, restarts, last, what)
    sick(p_ns, wl, pod, p_node)
}

function finish_pod(   i, settled) {
    if (pod == "") return
    container = ""
    settled = 0
    if (phase == "Failed") {
        if (!recent(ready_at == "" ? created : ready_at)) { n_old++; settled = 1 }
        else if (p_reason == "Evicted" || p_reason ~ /^(OutOf|Preempt|NodeShutdown|Terminated|NodeAffinity|UnexpectedAdmission)/) { found("pod-evicted", 0, created, p_reason ": " p_text); settled = 1 }
        else if (p_reason == "NodeLost") { found("node-not-ready", 0, "", p_reason ": " p_text); settled = 1 }
    }
    if (deleted != "" && now - epoch(deleted) > 300 && !settled) { found(p_node in bad_node ? "node-not-ready" : "rollout-stuck", 0, deleted, "Terminating since " deleted); settled = 1 }
    if (!settled && unscheduled != "") {
        found(tolower(unscheduled) ~ /persistentvolumeclaim|volume node affinity|persistent volumes to bind/ ? "storage" : "pod-pending", 0, unscheduled_at, "not scheduled: " unscheduled)
        settled = 1
    }
    for (i = 0; i < n_c && !settled; i++) judge_container(i)
    if (!settled && n_c == 0 && phase == "Pending" && p_node != "" && now - epoch(created) > 120) creating("")
    container = ""
    if (!settled && !((p_ns, pod) in sick_pod)) judge_wait()
    for (i = 0; i < n_c && !settled; i++) judge_use(i)
    container = ""
    if (dns) { n_dns++; if ((p_ns, pod) in sick_pod) n_pods++; else n_dns_well++ }
    pod = ""
}

# judge_wait: a pod that gets no further than its init containers, though none of them has run for long.
function judge_wait(   i, from, text) {
    from = epoch(waits_from) > epoch(created) ? waits_from : created
    if (phase != "Pending" || now - epoch(from) <= 120) return
    text = "and no init container says why"
    for (i = 0; i < n_c; i++) if (c[i, 2] == "init" && c[i, 6] == "running" && !(c[i, 3] in sidecar)) { text = "init container " c[i, 3] " runs now"; container = c[i, 3] }
    for (i = 0; i < n_c; i++) if (c[i, 2] == "main" && c[i, 6] == "waiting" && plain(c[i, 7]) == "PodInitializing") {
        found("pod-pending", 0, from, "its containers wait (PodInitializing) since " from " (" age(now - epoch(from)) "), " text)
        return
    }
}

# judge_use: a container that uses all the CPU it may have waits for more. A job is meant to use what there is.
function judge_use(i,   cname, most, used) {
    cname = c[i, 3]
    most = quantity(cpu_limit[cname])
    used = quantity(use[p_ns, pod, cname])
    if (c[i, 6] != "running" || most <= 0 || used < 0.95 * most || p_owner ~ /^Job\//) return
    container = cname
    found("cpu-throttling", 0, "", "container " cname " uses " int(used * 1000 + 0.5) "m of its CPU limit " cpu_limit[cname] " now: it is throttled")
}

# A container's fields: 2 init or main, 3 name, 4 ready, 5 restarts, 6 state, 7 reason, 8 exit code, 9 message,
# 10 started or finished (empty while waiting); 11 reason, 12 exit code and 13 end of the run before; 15 startup passed.
function judge_container(i,   cname, restarts, state, reason, code, last_reason, last_code, last_at, text, memory, said) {
    cname = c[i, 3]; restarts = c[i, 5] + 0; state = c[i, 6]; reason = plain(c[i, 7]); code = c[i, 8]; text = plain(c[i, 9])
    last_reason = plain(c[i, 11]); last_code = c[i, 12]; last_at = c[i, 13]
    container = cname
    said = (c[i, 2] == "init" ? "init container " : "container ") cname
    memory = limit[cname]
    memory = memory == "" ? "no memory limit" : "limit " memory
    if (state == "waiting") {
        if (reason ~ /^(ErrImagePull|ImagePullBackOff|InvalidImageName|ErrImageNeverPull|RegistryUnavailable|ImageInspectError)$/) found("image-pull-back-off", 0, "", said ", " reason ": " text)
        else if (reason == "CreateContainerConfigError") found("missing-config", 0, "", said ": " text)
        else if (reason == "CrashLoopBackOff" && last_reason == "OOMKilled") found("oom-killed", restarts, last_at, said ": OOMKilled, exit " last_code ", " memory ", " restarts " restarts, now CrashLoopBackOff")
        else if (reason == "CrashLoopBackOff" && (p_ns, pod) in liveness && last_code ~ /^(137|143)$/) found("probe-failure", restarts, last_at, said ": killed by its liveness probe, exit " last_code ", " restarts " restarts: " liveness[p_ns, pod])
        else if (reason == "CrashLoopBackOff") found("crash-loop-back-off", restarts, last_at, said ": exit " last_code " (" meaning(last_code) "), " last_reason ", " restarts " restarts")
        else if (reason ~ /^(RunContainerError|CreateContainerError|StartError|PostStartHookError)$/) found("crash-loop-back-off", restarts, last_at, said ", " reason ": " text)
        else if (now - epoch(created) > 120 && reason == "ContainerCreating" && !((p_ns, pod) in sick_pod)) creating(said)
        return
    }
    if (state == "terminated" && code + 0 != 0 && recent(c[i, 10])) {
        if (reason == "OOMKilled") found("oom-killed", restarts, c[i, 10], said ": OOMKilled, exit " code ", " memory ", " restarts " restarts")
        else if (p_owner ~ /^Job\//) found("job-failed", restarts, c[i, 10], said ": exit " code " (" meaning(code) "), " reason)
        else found("crash-loop-back-off", restarts, c[i, 10], said ": ended " c[i, 10] ", exit " code " (" meaning(code) "), " reason)
        return
    }
    if (state != "running") return
    if (c[i, 2] == "init" && now - epoch(c[i, 10]) > 120 && !(cname in sidecar)) found("pod-pending", restarts, c[i, 10], said " has run since " c[i, 10] " (" age(now - epoch(c[i, 10])) "), and the pod waits for it to end")
    else if (c[i, 2] == "init" && now - epoch(c[i, 10]) > 120 && phase == "Pending" && c[i, 15] == "false") found("pod-pending", restarts, c[i, 10], "sidecar " cname " has not passed its startup probe since " c[i, 10] " (" age(now - epoch(c[i, 10])) "), and the pod waits for that")
    if (last_reason == "OOMKilled" && recent(last_at)) found("oom-killed", restarts, last_at, said ": OOMKilled, exit " last_code ", " memory ", " restarts " restarts, runs again")
    else if (restarts > 0 && last_code + 0 != 0 && recent(last_at)) found((p_ns, pod) in liveness && last_code ~ /^(137|143)$/ ? "probe-failure" : "crash-loop-back-off", restarts, last_at, said ": last exit " last_code " (" meaning(last_code) ") at " last_at ", " restarts " restarts, runs again")
    if (c[i, 2] == "main" && c[i, 4] == "false" && now - epoch(c[i, 10]) > 30) found(p_node in bad_node ? "node-not-ready" : "probe-failure", restarts, ready_at, said " runs but is not ready" ((p_ns, pod) in probe ? ": " probe[p_ns, pod] : ", no probe event seen"))
}

function creating(said,   text) {
    container = ""   # it never ran: there is no log
    text = (p_ns, pod) in mount ? mount[p_ns, pod] : (p_ns, pod) in sandbox ? sandbox[p_ns, pod] : "no event says why"
    if (p_node in bad_node) found("node-not-ready", 0, created, "being created since " created " on a node that is not ready")
    else if ((p_ns, pod) in mount) found(tolower(text) ~ /(configmap|secret) .*not found|references non-existent|couldn't find key/ ? "missing-config" : "storage", 0, created, "being created since " created ": " text)
    else if ((p_ns, pod) in sandbox) found("service-unreachable", 0, created, "no network for the pod since " created ": " text)
    else found("pod-pending", 0, created, "being created since " created ": " text)
}

# judge_events: what events say that no pod shows; and their groups, by reason, workload and how the message begins.
function judge_events(   i, ns, reason, object, text, low, wl, gist, key) {
    for (i = 1; i <= n_raw; i++) {
        ns = e_ns[i]; reason = e_reason[i]; object = e_kind[i] "/" e_name[i]; text = e_says[i]; low = tolower(text)
        wl = owner_of(ns, object)
        if (low ~ EXPIRED || reason ~ /^(FailedCreate|ReplicaSetCreateError|FailedUpdate)$/) add(refusal(low), ns, wl, object, "", 0, e_at[i], text)
        else if (reason ~ /^(FailedBinding|ProvisioningFailed|VolumeResizeFailed|VolumeMismatch)$/) add("storage", ns, wl, object, "", 0, e_at[i], reason ": " text)
        else if (low ~ /cannot (get|list|watch|create|update|patch|delete) resource/) add("admission-denied", ns, wl, object, "", 0, e_at[i], reason ": " text)
        gist = text
        while (e_name[i] != "" && (key = index(gist, e_name[i]))) gist = substr(gist, 1, key - 1) substr(gist, key + length(e_name[i]))
        gsub(/[0-9]+/, "", gist)
        key = ns SUBSEP reason SUBSEP wl SUBSEP substr(gist, 1, 40)
        if (!(key in e_count)) e_keys[++n_events] = key
        e_count[key] += e_times[i]
        if (!((key, object) in e_known)) { e_known[key, object] = 1; e_objects[key]++; e_object[key] = object }
        if (epoch(e_at[i]) >= epoch(e_last[key])) { e_last[key] = e_at[i]; e_text[key] = text }
    }
}

# owner_of(NS, OBJECT): its workload; of a pod that is gone, what its name lets guess.
function owner_of(ns, object,   name) {
    name = object
    sub(/^[^\/]*\//, "", name)
    if (object ~ /^ReplicaSet\//) return workload(object, "", rollout_of[ns, object])
    if (object ~ /^Job\// && job_owner[ns, name] != "") return job_owner[ns, name]
    if (object !~ /^Pod\//) return object
    if ((ns, name) in workload_of) return workload_of[ns, name]
    sub(/-[b-df-hj-np-tv-z0-9]+-[b-df-hj-np-tv-z0-9][b-df-hj-np-tv-z0-9][b-df-hj-np-tv-z0-9][b-df-hj-np-tv-z0-9][b-df-hj-np-tv-z0-9]$/, "-*", name)
    return "Pod/" name
}

# judge_cron_job: what its schedule wanted and did not get. Without a zone a schedule is taken as UTC; in another zone
# it is late by a day at most before it counts.
function judge_cron_job(ns, name, created, schedule, suspend, last, success, active, zone, concurrency,   ref, due_at, from, more) {
    ref = "CronJob/" name
    if (kind_of(ref) == focus) n_focus++
    if (suspend != "") {
        if (++n_suspended <= MOST_OBJECTS) suspended = suspended " " ns "/" name " (" (last == "" ? "never ran" : "last run " last) ")"
        return
    }
    sub(/^(CRON_)?TZ=[^ ]+ +/, "", schedule)
    zone = zone ~ /^(|UTC|Etc\/UTC|GMT)$/ ? "" : zone
    due_at = last_due(schedule, now - (zone == "" ? 120 : 54000))
    from = epoch(last == "" ? created : last)
    more = active ? ", " active " run still active" (concurrency == "Forbid" ? " and concurrencyPolicy Forbid" : "") : ""
    if (due_at && from < due_at - (zone == "" ? 0 : 50400)) add("job-failed", ns, ref, ref, "", 0, last, "missed: \"" schedule "\" was due " moment(due_at) (zone == "" ? "" : " (" zone ")") ", last run " (last == "" ? "never" : last) more)
    if (last != "" && !active && now - epoch(last) > 60 && epoch(success) < epoch(last)) add("job-failed", ns, ref, ref, "", 0, last, "the run of " last " did not succeed, last success " (success == "" ? "never" : success))
}

function after_pods(   i, part, key, kind) {
    for (i = 1; i <= n_leaving; i++) {
        key = leaving[i]
        if (now - epoch(leaves_at[key]) > 300) add("namespace-terminating", key, "Namespace/" key, "Namespace/" key, "", 0, leaves_at[key], "being deleted since " leaves_at[key] leaves_why[key])
    }
    for (i = 1; i <= n_pvcs; i++) {
        split(pvcs[i], part, SUBSEP)
        # A claim that waits for its first consumer is healthy: only one that something complains about is a symptom.
        if (part[1] in storage_ns) add("storage", part[1], "PersistentVolumeClaim/" part[2], "PersistentVolumeClaim/" part[2], "", 0, "", pvc_text[i])
    }
    for (i = 1; i <= n_lagging; i++) {
        split(lagging[i], part, SUBSEP)
        key = part[1] SUBSEP part[2]
        if (key in stuck) add("rollout-stuck", part[1], part[2], part[2], "", 0, "", stuck[key] " (" lag_text[i] ")")
        else if (!(key in of_workload) && !((part[1], part[2]) in has_symptom)) add("rollout-stuck", part[1], part[2], part[2], "", 0, "", lag_text[i])
    }
    for (i = 1; i <= n_services && !index(refused, " endpointslices "); i++) {
        split(services[i], part, SUBSEP)
        # By custom a service has the name of its workload: one that is scaled to zero is meant to have no endpoint.
        if (!up[services[i]] && !(services[i] in at_zero)) add("service-unreachable", part[1], "Service/" part[2], "Service/" part[2], "", 0, "", down[services[i]] ? "no ready endpoint, " down[services[i]] " that are not ready" : "no endpoint: its selector matches no pod that has an address")
    }
    for (i = 1; i <= n_backends && !index(refused, " services "); i++) {
        split(backends[i], part, SUBSEP)
        key = part[6] SUBSEP part[3]
        kind = part[5] "/" part[2]
        if (scope != "*" && part[6] != scope) continue
        if (!(key in exists)) add("ingress-5xx", part[1], kind, kind, "", 0, "", "backend service " part[3] " does not exist (host " part[4] ")")
        else if (!up[key] && !index(refused, " endpointslices ")) add("ingress-5xx", part[1], kind, kind, "", 0, "", "backend service " part[3] " has no ready endpoint (host " part[4] ")")
    }
}

function blast() {
    if (!n_groups) return "nothing-found"
    if (by_symptom["control-plane"] || by_symptom["node-not-ready"]) return "cluster-infrastructure"
    if (n_sick["ns"] > 1) return "multiple-namespaces"
    if (n_sick["wl"] > 1 || !n_sick["wl"]) return "single-namespace"
    return n_sick["pods"] > 1 ? "single-workload" : n_sick["pods"] == 1 ? "single-pod" : "single-workload"
}

# before(A, B): focus first, then causes before consequences, then the wider one, then by name.
function before(a, b) {
    if (in_focus[a] != in_focus[b]) return in_focus[a] + 0 > in_focus[b] + 0
    if (rank[g_sym[a]] != rank[g_sym[b]]) return rank[g_sym[a]] < rank[g_sym[b]]
    if (count[a] != count[b]) return count[a] > count[b]
    return a < b
}

# Only what is shown is put in order: a cluster may have thousands of groups.
function sort_groups(   i, j, best, held) {
    for (i = 1; i <= n_groups && i <= MOST_SYMPTOMS; i++) {
        best = i
        for (j = i + 1; j <= n_groups; j++) if (before(groups[j], groups[best])) best = j
        held = groups[i]; groups[i] = groups[best]; groups[best] = held
    }
}

# sort_events: the latest of each reason first, then of each the one that most objects have, and so on: what comes a
# thousand times hides nothing else.
function sort_events(   i, j, best, held, part) {
    for (i = 1; i <= n_events; i++) {
        split(e_keys[i], part, SUBSEP)
        e_of[e_keys[i]] = part[2]
    }
    for (i = 1; i <= n_events && i <= MOST_EVENTS; i++) {
        best = i
        for (j = i + 1; j <= n_events; j++) if (event_before(e_keys[j], e_keys[best])) best = j
        held = e_keys[i]; e_keys[i] = e_keys[best]; e_keys[best] = held
        taken[e_of[e_keys[i]]]++
    }
}

function event_before(a, b) {
    if (taken[e_of[a]] + 0 != taken[e_of[b]] + 0) return taken[e_of[a]] + 0 < taken[e_of[b]] + 0
    if (taken[e_of[a]] && e_objects[a] != e_objects[b]) return e_objects[a] > e_objects[b]
    if (epoch(e_last[a]) != epoch(e_last[b])) return epoch(e_last[a]) > epoch(e_last[b])
    return a < b
}

# blinds(I): whether a call tells less than it should. Gateways and routes that the cluster has no kind for, it has not.
function blinds(i) { return fates[i] != "ok" && !(fates[i] == "absent" && command[i] ~ /gateway\.networking/) }

# unread(REF): whether the kind of an object was asked for in vain.
function unread(ref,   kind) {
    kind = ref
    sub(/\/.*/, "", kind)
    return index(refused, " " kind "s ") || index(refused, " " kind "es ")
}

function in_ns(ns) { return kubectl (ns == "" ? "" : " -n " ns) " " }

# steps(G): the commands that decide this group, one a line.
function steps(g,   sym, k, ref, pod, one, cname, events_of) {
    sym = g_sym[g]; k = in_ns(g_ns[g]); ref = first[g]
    pod = ref; sub(/^[A-Za-z]+\//, "", pod)
    cname = g_container[g] == "" ? "" : " -c " g_container[g]
    events_of = k "get events --field-selector involvedObject.name=" pod
    one = ref ~ /^Pod\// ? "scripts/diagnose_pod.sh -n " g_ns[g] " " pod : ""
    if (sym == "crash-loop-back-off" || sym == "oom-killed" || sym == "probe-failure") return one "\n" k "logs " pod cname " --previous --tail=50" (g_wl[g] ~ /^(Deployment|StatefulSet|DaemonSet|Rollout)\// ? "\nscripts/diagnose_rollout.sh -n " g_ns[g] " " g_wl[g] : "")
    if (sym == "image-pull-back-off" || sym == "missing-config" || sym == "pod-evicted") return one "\n" events_of
    if (sym == "cpu-throttling") return one "\n" k "top pod " pod " --containers"
    if (sym == "namespace-terminating") return kubectl " get namespace " pod " -o jsonpath='{.status.conditions}'\n" kubectl " get apiservices"
    if (sym == "pod-pending" && g_nodes[g] != "") return one "\n" (cname == "" ? events_of : k "logs " pod cname " --tail=50")
    if (sym == "pod-pending") return one "\n" kubectl " describe nodes" "\n" k "get resourcequota,limitrange"
    if (sym == "node-not-ready") return ref ~ /^Node\// ? "scripts/diagnose_node.sh " pod : one
    if (sym == "storage") return (ref ~ /^PersistentVolumeClaim\// ? "scripts/diagnose_storage.sh -n " g_ns[g] " " pod : one "\n" k "get pvc") "\n" kubectl " get storageclass"
    if (sym == "service-unreachable") return ref ~ /^Service\// ? "scripts/diagnose_service.sh -n " g_ns[g] " " pod : one
    if (sym == "ingress-5xx") return k "describe " tolower(ref)
    if (sym == "rollout-stuck") return ref ~ /^Pod\// ? one : "scripts/diagnose_rollout.sh -n " g_ns[g] " " ref
    if (sym == "autoscaler") return k "describe hpa " pod "\n" k "top pods"
    if (sym == "job-failed" || sym == "helm-release") {
        if (ref ~ /^CronJob\//) return k "get cronjob " pod " -o wide\n" k "get jobs,pods\n" events_of
        return one == "" ? k "get job " pod " -o wide\n" events_of "\n" k "logs job/" pod " --tail=50" : one
    }
    if (sym == "quota-exceeded") return k "describe resourcequota,limitrange\n" events_of
    if (sym == "admission-denied" || sym == "certificate") return events_of "\n" kubectl " get validatingwebhookconfigurations,mutatingwebhookconfigurations"
    if (sym == "control-plane") return kubectl " get --raw '/readyz?verbose'\n" kubectl " -n kube-system get pods -o wide"
    return ""
}

function seen_of(g,   all) {
    all = total[g_ns[g], g_wl[g]]
    if (first[g] !~ /^Pod\//) return count[g] > 1 ? count[g] " objects" : ""
    return count[g] " of " (all < count[g] ? count[g] : all) " pods"
}

function words(list, n,   part, i, most, text) {
    most = split(list, part, " ")
    text = "["
    for (i = 1; i <= most; i++) text = text (i > 1 ? ", " : "") json(part[i])
    return text "]"
}

function lines(list,   part, i, most, text) {
    most = split(list, part, "\n")
    text = "["
    for (i = 1; i <= most; i++) if (part[i] != "") text = text (text == "[" ? "" : ", ") json(part[i])
    return text "]"
}

function text_report(   i, g, line, step, n, key, part) {
    print bold "TRIAGE " end stamp "  scope " (scope == "*" ? "all namespaces" : "namespace " scope) "  last " age(since) "  read only"
    print "blast radius: " blast() "  (namespaces " n_sick["ns"] + 0 ", workloads " n_sick["wl"] + 0 ", pods " n_sick["pods"] + 0 " of " n_pods + 0 ", nodes " n_sick["nodes"] + 0 ")" (blind ? "  of what could be read" : "")
    if (n_sick["pods"] > 1 && n_sick["nodes"] == 1) print "shared: every affected pod that has a node is on " a_node
    for (i = 1; i <= n_full && i <= MOST_OBJECTS; i++) print "quota full: " full[i]
    if (n_old) print "not listed: " n_old " failed pods older than " age(since)
    if (cordoned != "") print "cordoned:" cordoned
    if (suspended != "") print "suspended CronJobs:" suspended (n_suspended > MOST_OBJECTS ? " and " n_suspended - MOST_OBJECTS " more" : "")
    if (fate_of["9-dns"] == "ok") print n_dns ? "cluster DNS: " n_dns_well + 0 " of " n_dns " pods of kube-system are well" : "cluster DNS: no pod of kube-system is labelled k8s-app=kube-dns, so it was not judged"
    if (!n_pods && !n_groups) print "no pods in scope: check the namespace and the context before you call this healthy"
    if (focus != "" && !n_focus) print unread(focus) ? focus " itself was not read" : "nothing was found of " focus " itself"
    print "\n" bold "Symptoms: " n_groups + 0 end " (causes before consequences" (focus == "" ? "" : "; " focus " first") ")"
    if (!n_groups) print "  none of what is looked for here, in what could be read: no proof of health"
    for (i = 1; i <= n_groups && i <= MOST_SYMPTOMS; i++) {
        g = groups[i]
        line = i ". " bold g_sym[g] end "  " g_wl[g] (g_ns[g] == "" ? "" : "  in " g_ns[g])
        if (seen_of(g) != "") line = line "  " seen_of(g)
        if (g_restarts[g]) line = line ", " g_restarts[g] (g_sym[g] ~ /^(job-failed|helm-release)$/ ? " failures" : " restarts")
        if (g_last[g] != "") line = line ", last " g_last[g] " (" age(now - epoch(g_last[g])) " ago)"
        print line
        for (key = 1; key <= n_details[g]; key++) print "   " details[g, key]
        if (first[g] ~ /^Pod\// || count[g] > 1) print "   " objects[g] (count[g] > MOST_OBJECTS ? " and " count[g] - MOST_OBJECTS " more" : "") (g_nodes[g] == "" ? "" : "  on " g_nodes[g] (n_nodes[g] > MOST_OBJECTS ? " and " n_nodes[g] - MOST_OBJECTS " more" : ""))
        print "   read references/" g_sym[g] ".md"
    }
    if (n_groups > MOST_SYMPTOMS) {
        line = ""
        for (i = 1; i in order; i++) if (by_symptom[order[i]]) line = line (line == "" ? "" : ", ") order[i] " in " by_symptom[order[i]]
        print "all of them, by number of workloads or objects: " line
    }
    if (n_groups > MOST_SYMPTOMS) print "... " n_groups - MOST_SYMPTOMS " more: narrow with -n NS or --resource KIND/NAME"
    if (n_groups) {
        print "\n" bold "Next steps" end
        for (i = 1; i <= n_groups && i <= 5; i++) {
            n = split(steps(groups[i]), step, "\n")
            for (key = 1; key <= n; key++) if (step[key] != "" && !(step[key] in printed)) { printed[step[key]] = 1; print "  " step[key] }
        }
    }
    if (fate_of["3-events"] != "ok") print "\n" bold "Warning events: " (n_events ? n_events " kinds, and not all were read" : "not read") end " (" fate_of["3-events"] ")"
    else print "\n" bold "Warning events: " n_events + 0 end (n_events ? " kinds by reason and workload, latest of each reason first" : "")
    for (i = 1; i <= n_events && i <= MOST_EVENTS; i++) {
        key = e_keys[i]
        split(key, part, SUBSEP)
        print "  " e_last[key] " x" e_count[key] + 0 "  " part[2] "  " part[1] " " (e_objects[key] > 1 ? part[3] " (" e_objects[key] " objects)" : e_object[key]) "  " clip(e_text[key], 220)
    }
    if (n_events > MOST_EVENTS) {
        line = ""
        for (; i <= n_events; i++) left_of[e_of[e_keys[i]]]++
        for (i = MOST_EVENTS + 1; i <= n_events; i++) if (left_of[e_of[e_keys[i]]]) { line = line ", " e_of[e_keys[i]] " " left_of[e_of[e_keys[i]]]; left_of[e_of[e_keys[i]]] = 0 }
        print "  ... " n_events - MOST_EVENTS " more" clip(line, 200)
    }
    print "\n" bold "Not seen" end
    for (i = 1; i <= n_fates; i++) if (blinds(i)) print "  " fates[i] ": " command[i] "\n      " clip(why[i], 300)
    if (!blind) print "  nothing was refused"
    for (i = 1; i <= n_fates; i++) if (hidden[i] != "") print "  masked: " hidden[i] " in " command[i]
    print "\n" bold "Commands executed" end " (output templates left out)"
    for (i = 1; i <= n_fates; i++) print "  " command[i] (fates[i] == "absent" && !blinds(i) ? "  (not installed)" : "")
}

function json_report(   i, g, sep, key, part) {
    print "{"
    print "  \"version\": 1, \"taken_at\": " json(stamp) ", \"scope\": " json(scope == "*" ? "all namespaces" : scope) ", \"since_seconds\": " since ","
    print "  \"blast_radius\": {\"class\": " json(blast()) ", \"workloads\": " n_sick["wl"] + 0 ", \"pods\": " n_sick["pods"] + 0 ", \"pods_read\": " n_pods + 0 ", \"nodes\": " n_sick["nodes"] + 0 ", \"namespaces\": " n_sick["ns"] + 0 ", \"complete\": " (blind ? "false" : "true") "},"
    print "  \"symptoms\": ["
    for (i = 1; i <= n_groups && i <= MOST_SYMPTOMS; i++) {
        g = groups[i]
        sep = i < n_groups && i < MOST_SYMPTOMS ? "," : ""
        print "    {\"symptom\": " json(g_sym[g]) ", \"namespace\": " json(g_ns[g]) ", \"workload\": " json(g_wl[g]) ", \"affected\": " count[g] ", \"restarts\": " g_restarts[g] + 0 ", \"last\": " (g_last[g] == "" ? "null" : json(g_last[g])) ","
        print "     \"detail\": " json(details[g, 1]) ", \"objects\": " words(objects[g]) ", \"nodes\": " words(g_nodes[g]) ","
        print "     \"in_focus\": " (in_focus[g] ? "true" : "false") ", \"reference\": " json("references/" g_sym[g] ".md") ", \"next\": " lines(steps(g)) "}" sep
    }
    print "  ], \"symptoms_left_out\": " (n_groups > MOST_SYMPTOMS ? n_groups - MOST_SYMPTOMS : 0) ","
    print "  \"events\": ["
    sep = ""
    for (i = 1; i <= n_events && i <= MOST_EVENTS; i++) {
        key = e_keys[i]
        split(key, part, SUBSEP)
        printf "%s    {\"last\": %s, \"count\": %d, \"reason\": %s, \"namespace\": %s, \"workload\": %s, \"object\": %s, \"objects\": %d, \"message\": %s}", sep, json(e_last[key]), e_count[key], json(part[2]), json(part[1]), json(part[3]), json(e_object[key]), e_objects[key], json(clip(e_text[key], 220))
        sep = ",\n"
    }
    print "\n  ], \"events_left_out\": " (n_events > MOST_EVENTS ? n_events - MOST_EVENTS : 0) ", \"events_read\": " (fate_of["3-events"] == "ok" ? "true" : "false") ","
    print "  \"calls\": ["
    for (i = 1; i <= n_fates; i++) print "    {\"fate\": " json(fates[i]) ", \"command\": " json(command[i]) ", \"reason\": " json(clip(why[i], 300)) ", \"masked\": " json(hidden[i]) "}" (i < n_fates ? "," : "")
    print "  ]\n}"
}

END {
    finish_pod()
    judge_events()
    for (i = 1; i <= n_groups; i++) if (g_sym[groups[i]] == "storage") storage_ns[g_ns[groups[i]]] = 1
    after_pods()
    # With nothing but consequences in sight, they are what is known of the reach.
    only = !n_sick["wl"]
    for (i = 1; i <= n_groups && only; i++) hit(g_ns[groups[i]], g_wl[groups[i]])
    for (i = 1; i <= n_fates; i++) if (blinds(i)) blind = 1
    sort_groups()
    sort_events()
    if (output == "json") json_report()
    else text_report()
}
