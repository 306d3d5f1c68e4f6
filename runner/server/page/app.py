"""Pages as an application: who asks, by a cookie; forms; and errors as pages.

A form is answered only if a page of this server has sent it: its origin and the proof of its login say so.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote

from msgspec import Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route as StarlettePath

from runner.core.errors import BadRequest, NoMethod, Rejected, RunnerError, Unauthorized
from runner.ops.host.tokens import StoredToken
from runner.report.html.render import environment, style
from runner.server.border import App, known_error, read_limited, stored_token
from runner.server.page.login import Login, Logins, check_origin, check_proof, token_of
from runner.server.page.oidc_login import LIFE as LOGIN_SECONDS
from runner.server.page.oidc_login import RETURN, OidcLogin
from runner.server.route import BASE, Call, Reply, Server, read_query

FORM = "application/x-www-form-urlencoded"
_MOST_FORM = 1 << 16  # bytes; that of a login comes from anybody
_TEMPLATES = Path(__file__).with_name("templates")
_ASSETS = {
    "page.css": (style() + (_TEMPLATES / "server.css").read_text(encoding="utf-8"), "text/css"),
    "page.js": ((_TEMPLATES / "page.js").read_text(encoding="utf-8"), "text/javascript"),
}
_VERSION = sha256("".join(text for text, _ in _ASSETS.values()).encode()).hexdigest()[:16]
_MOST_FIELDS = 100  # of a form
_OURS = re.compile(r"/(?:[a-z][\w/.-]*)?(?:\?[\w=&%.*-]*)?")  # where a login may lead to
_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:;"
    " form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
}


class Visit(Struct, eq=False, kw_only=True):
    """A request by somebody who has logged in. ``form`` is what it sends."""

    app: App
    request: Request
    login: Login
    token: StoredToken
    form: Mapping[str, str] = {}

    @property
    def server(self) -> Server:
        return self.app.server

    def call(self, **more: Any) -> Call:
        return Call(server=self.server, token=self.token, path=self.request.path_params, **more)

    async def ask(self, method: str, path: str, query: Mapping[str, str] | None = None) -> Any:
        """Return what a route of the API answers to the one who visits; its path may use names of this one's."""
        route = self.app.routes[method, f"{BASE}{path}"]
        asked = read_query(query or {}, route.query) if route.query is not None else None
        answer = await self.app.do(route, self.call(query=asked))
        return answer.value if isinstance(answer, Reply) else answer


class Page(Struct, kw_only=True):
    """A template with its values. The names of ``more`` are those of the template."""

    template: str
    more: Mapping[str, object] = {}
    status: int = 200


class View(Struct, frozen=True, kw_only=True):
    """A path of the pages: what shows it, and what is done with its form, which returns where to go then."""

    path: str
    show: Callable[[Visit], Awaitable[Page | Callable[..., Any]]] | None = None
    do: Callable[[Visit], Awaitable[str]] | None = None


def pages(app: App, views: Sequence[View], *, secure: bool) -> list[StarlettePath]:
    """Return the paths of all pages."""
    logins = Logins(secure=secure)
    found = [StarlettePath(view.path, _Shown(app, logins, view)) for view in views]
    found += [StarlettePath(f"/{name}", _Asset(text, media)) for name, (text, media) in _ASSETS.items()]
    found += [StarlettePath("/login", _LoginForm(app, logins)), StarlettePath("/logout", _Logout(app, logins))]
    if (issuer := app.server.login) is not None:
        away, back = _SentAway(app, logins, issuer), _ComeBack(app, logins, issuer)
        found += [StarlettePath("/login/begin", away), StarlettePath(RETURN, back)]
    return found


class _Answering:
    """A path of pages, as the router wants it; errors become pages."""

    def __init__(self, app: App, logins: Logins) -> None:
        self._app, self._logins = app, logins

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        try:
            response = await self.answer(request)
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001  # the border: what is nobody's fault but ours, one request's only
            response = self.refusal(request, known_error(error))
        await response(scope, receive, send)

    async def answer(self, request: Request) -> Any:
        raise NotImplementedError

    def refusal(self, request: Request, error: RunnerError) -> Response:
        findings = error.findings if isinstance(error, Rejected) else ()
        page = Page(template="error.html", more={"error": error, "findings": findings}, status=error.http_status)
        return _render(page, request, self._logins.find(request))

    async def form(self, request: Request) -> dict[str, str]:
        """Return the fields of a form that one of our pages has sent."""
        check_origin(request)
        sent = (await read_limited(request, FORM, most=_MOST_FORM)).decode(errors="replace")
        try:
            return dict(parse_qsl(sent, max_num_fields=_MOST_FIELDS))
        except ValueError as error:
            raise BadRequest(f"the form has more than {_MOST_FIELDS} fields") from error


class _Shown(_Answering):
    def __init__(self, app: App, logins: Logins, view: View) -> None:
        super().__init__(app, logins)
        self._view = view

    async def answer(self, request: Request) -> Any:
        login = self._logins.find(request)
        try:
            token = await token_of(login, self._app.server.env.store) if login is not None else None
        except Unauthorized:  # it was revoked
            token = None
        if login is None or token is None:
            return _redirect(f"/login?next={quote(_place(request), safe='')}")
        visit = Visit(app=self._app, request=request, login=login, token=token)
        if request.method in ("GET", "HEAD") and self._view.show is not None:
            found = await self._view.show(visit)
            return _render(found, request, login) if isinstance(found, Page) else found
        if request.method == "POST" and self._view.do is not None:
            visit.form = await self.form(request)
            check_proof(login, visit.form.get("proof", ""))
            return _redirect(await self._view.do(visit))
        raise NoMethod("that is not possible here", allowed=["GET"] if self._view.show is not None else ["POST"])


class _LoginForm(_Answering):
    async def answer(self, request: Request) -> Any:
        if request.method != "POST":
            return _login_form(self._app, request)
        token = (await self.form(request)).get("token", "").strip()
        try:
            await stored_token(token, self._app.server)
        except Unauthorized as error:
            return _login_form(self._app, request, error, of_token=True)
        response = _redirect(_next(request))
        self._logins.begin(token, response)
        return response


def _login_form(app: App, request: Request, error: RunnerError | None = None, *, of_token: bool = False) -> Response:
    issuer, then = app.server.login, quote(_next(request), safe="")
    page = Page(
        template="login.html",
        more={"error": error, "of_token": of_token, "next": then, "issuer": issuer},
        status=error.http_status if error is not None else 200,
    )
    return _render(page, request, None)


class _OfIssuer(_Answering):
    """A page of a login by an issuer; who may not log in is told at the form."""

    def __init__(self, app: App, logins: Logins, issuer: OidcLogin) -> None:
        super().__init__(app, logins)
        self._issuer = issuer

    def base(self, request: Request) -> str:
        """Return the URL of this server by the name that the browser has for it, which the border has checked."""
        return f"http{'s' * self._logins.secure}://{request.headers['host']}"

    def refusal(self, request: Request, error: RunnerError) -> Response:
        return _login_form(self._app, request, error)


class _SentAway(_OfIssuer):
    async def answer(self, request: Request) -> Any:
        place, state = await self._issuer.begin(self.base(request), _next(request))
        response = _redirect(place)
        self._logins.send_away(state, LOGIN_SECONDS, response)
        return response


class _ComeBack(_OfIssuer):
    async def answer(self, request: Request) -> Any:
        state = self._logins.state(request)
        token, then = await self._issuer.end(self.base(request), state, request.query_params)
        # What another site has led to is sent no strict cookie, redirects included: the page goes on by itself.
        response = _render(Page(template="come_back.html", more={"then": then}), request, None)
        self._logins.begin(token, response)
        return response


class _Logout(_Answering):
    async def answer(self, request: Request) -> Any:
        login = self._logins.find(request)
        form = await self.form(request)
        response = _redirect("/login")
        if login is not None:
            check_proof(login, form.get("proof", ""))
            self._logins.end(request, response)
        return response


class _Asset:
    """A file that pages refer to, with its version in the query."""

    def __init__(self, text: str, media: str) -> None:
        self._text, self._media = text, media

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        headers = {**_HEADERS, "cache-control": "public, max-age=31536000, immutable"}
        await Response(self._text, headers=headers, media_type=self._media)(scope, receive, send)


def fragment(template: str, **values: object) -> str:
    """Render what is a part of a page only."""
    return environment(_TEMPLATES).get_template(template).render(values)


def _render(page: Page, request: Request, login: Login | None) -> Response:
    text = fragment(page.template, **page.more, login=login, here=request.url.path, version=_VERSION)
    return Response(text, page.status, _HEADERS, "text/html")


def _redirect(place: str) -> Response:
    return RedirectResponse(place, 303, _HEADERS)


def _place(request: Request) -> str:
    """Return where a browser is to come back to; not to what only a form leads to."""
    query = f"?{request.url.query}" if request.url.query else ""
    return f"{request.url.path}{query}" if request.method == "GET" else "/"


def _next(request: Request) -> str:
    wanted = request.query_params.get("next", "/")
    return wanted if _OURS.fullmatch(wanted) else "/"
