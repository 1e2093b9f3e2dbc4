package status_test

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	browserlog "github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"github.com/trivet-csi/trivet/cluster/status"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// hang is longer than the browser takes for a step.
const hang = 2 * time.Minute

// browser is a tab of Chromium that shows the page. A test fails if the page causes an error in the console or a
// request to another server.
type browser struct {
	t      *testing.T
	ctx    context.Context
	server *httptest.Server
	report atomic.Pointer[status.Report]

	mu       sync.Mutex
	problems []string
}

// newBrowser starts Chromium and loads the page in a window of a width and in a colour scheme, light or dark.
func newBrowser(t *testing.T, r status.Report, width int64, scheme string) *browser {
	t.Helper()
	testenv.Require(t, "browser")
	path, err := exec.LookPath("chromium")
	if err != nil {
		t.Fatal("this test needs a browser: install the package chromium, or set TRIVET_TEST_WITHOUT=browser to skip it")
	}
	b := &browser{t: t}
	b.report.Store(&r)
	mux := http.NewServeMux()
	status.Handle(mux, func(context.Context) status.Report { return *b.report.Load() })
	b.server = httptest.NewServer(mux)
	t.Cleanup(b.server.Close)

	limited, cancel := context.WithTimeout(t.Context(), hang)
	t.Cleanup(cancel)
	options := append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(path), chromedp.UserDataDir(t.TempDir()), chromedp.NoSandbox, chromedp.DisableGPU,
		chromedp.Flag("disable-quic", true), chromedp.Flag("disable-component-update", true))
	allocated, cancel := chromedp.NewExecAllocator(limited, options...)
	t.Cleanup(cancel)
	b.ctx, cancel = chromedp.NewContext(allocated)
	t.Cleanup(cancel)
	must(t, chromedp.Listen(b.ctx, b.observe))
	must(t, chromedp.Do(b.ctx,
		chromedp.EmulateViewport(width, 900),
		chromedp.Func(func(ctx context.Context, target *chromedp.Target) error {
			features := []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}
			_, err := cdp.Call(ctx, target, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: features})
			return err
		}),
		chromedp.Navigate(b.server.URL)))
	t.Cleanup(func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		if len(b.problems) > 0 {
			t.Errorf("the page caused:\n%s", strings.Join(b.problems, "\n"))
		}
	})
	return b
}

// observe records an event of the page if it is a problem.
func (b *browser) observe(event any) {
	var problem string
	switch e := event.(type) {
	case *runtime.EventExceptionThrown:
		problem = e.ExceptionDetails.Text
	case *runtime.EventConsoleAPICalled:
		problem = "console." + string(e.Type)
		for _, argument := range e.Args {
			problem += " " + cmp.Or(argument.Description, string(argument.Value))
		}
	case *browserlog.EventEntryAdded:
		problem = fmt.Sprintf("%s: %s %s", e.Entry.Level, e.Entry.Text, e.Entry.URL)
	case *network.EventRequestWillBeSent:
		if !strings.HasPrefix(e.Request.URL, b.server.URL+"/") {
			problem = "a request to " + e.Request.URL
		}
	}
	if problem != "" {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.problems = append(b.problems, problem)
	}
}

// evaluate returns the value of a JavaScript expression.
func evaluate[T any](b *browser, expression string) T {
	b.t.Helper()
	value, err := chromedp.Run(b.ctx, chromedp.Evaluate[T](expression))
	must(b.t, err)
	return value
}

// visibleVolumes returns the names in the rows of the table of volumes that are visible.
func (b *browser) visibleVolumes() []string {
	b.t.Helper()
	return evaluate[[]string](b, `[...document.querySelectorAll("#volumes tbody tr")]
		.filter(row => row.getClientRects().length > 0).map(row => row.cells[0].innerText.split(/\s/)[0])`)
}

func (b *browser) wantVisible(names ...string) {
	b.t.Helper()
	if got := b.visibleVolumes(); !slices.Equal(got, names) {
		b.t.Errorf("got visible volumes %q, want %q", got, names)
	}
}

// screenshot writes a picture of the whole page to the test's artifacts (go test -artifacts).
func (b *browser) screenshot(name string) {
	b.t.Helper()
	picture, err := chromedp.Run(b.ctx, chromedp.FullScreenshot(100))
	must(b.t, err)
	must(b.t, os.WriteFile(filepath.Join(b.t.ArtifactDir(), name+".png"), picture, 0o600))
}

// clusterReport is a report with long names, several problems, and three volumes.
func clusterReport() status.Report {
	r := sample()
	r.Time = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	r.Processes = append(r.Processes,
		status.Process{Version: "v1"},
		status.Process{Node: "a-node-with-a-long-name.example.internal", Problem: `node "a-node-with-a-long-name.example.internal" cannot be reached at 10.0.0.1:9811`})
	r.Pools = append(r.Pools,
		status.Pool{Name: "slow", Node: "a-node-with-a-long-name.example.internal", Problem: "/var/lib/trivet/pools/a/very/long/path/without/any/space/in/it is not a mount point, and requireMount is set: mount its disk"},
		status.Pool{Name: "nas", SizeBytes: 4 << 40, UsedBytes: 3 << 40, PromisedBytes: 3 << 40, FreeBytes: 1 << 40, Volumes: 2, Trash: 1, Copies: 1})
	r.Volumes = append(r.Volumes,
		status.Volume{ID: "loop:nas:pvc-2", Name: "pvc-2", Pool: "nas", SizeBytes: 10 << 30, UsedBytes: 7 << 30, Content: "ext4", PublishedTo: []string{"a", "b"}, Claim: "team-with-a-long-name/data-database-0", Phase: "Released"},
		status.Volume{
			ID: "nfs:nas:pvc-3", Name: "pvc-3-0b5ad54e-7a3c-4f0b-9a55-3f1f5a1c2d3e", Pool: "nas", SizeBytes: 1 << 30, UsedBytes: -1, Content: "directory", Pod: "default/web-0",
			Health: []status.Health{{Status: "INACCESSIBLE", Reason: "ServerSilent", Message: "the server has not answered since 12:00"}},
		})
	return r
}

// TestBrowserSearch: the search shows the matching volumes, on wide and narrow screens, and an update replaces the
// data and keeps the search.
func TestBrowserSearch(t *testing.T) {
	for name, width := range map[string]int64{"wide": 1280, "phone": 390} {
		t.Run(name, func(t *testing.T) {
			r := clusterReport()
			b := newBrowser(t, r, width, "light")
			all := []string{"pvc-1", "pvc-2", "pvc-3-0b5ad54e-7a3c-4f0b-9a55-3f1f5a1c2d3e"}
			b.wantVisible(all...)
			must(t, chromedp.Do(b.ctx, chromedp.SendKeys("#search", "PVC-2")))
			b.wantVisible("pvc-2")
			b.screenshot("search")

			r.Volumes = append(slices.Clone(r.Volumes), status.Volume{ID: "loop:nas:pvc-20", Name: "pvc-20", Pool: "nas"})
			b.report.Store(&r)
			for !slices.Contains(b.visibleVolumes(), "pvc-20") { // until the next update
				time.Sleep(100 * time.Millisecond)
			}
			b.wantVisible("pvc-2", "pvc-20")
			if got := evaluate[string](b, `document.activeElement.id + " " + document.activeElement.value`); got != "search PVC-2" {
				t.Errorf("got focus and search text %q after the update, want %q", got, "search PVC-2")
			}
			must(t, chromedp.Do(b.ctx, chromedp.SendKeys("#search", "\b\b\b\b\bdatabase-0 (rel")))
			b.wantVisible("pvc-2")
			must(t, chromedp.Do(b.ctx, chromedp.SendKeys("#search", strings.Repeat("\b", len("database-0 (rel")))))
			b.wantVisible(append(all, "pvc-20")...)
		})
	}
}

// contrasts returns the visible texts whose contrast to their background is less than 4.5, the minimum of WCAG 2
// for normal text (success criterion 1.4.3). A text without a background of its own or of an ancestor fails.
const contrasts = `(() => {
	const rgb = color => { const [r, g, b, a = 1] = color.match(/[\d.]+/g).map(Number); return {r, g, b, a}; };
	const luminance = c => {
		const [r, g, b] = [c.r, c.g, c.b].map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
		return 0.2126 * r + 0.7152 * g + 0.0722 * b;
	};
	const background = e => {
		for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor); if (c.a === 1) return c; }
		return {r: NaN};
	};
	const low = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
	let checked = 0;
	while (texts.nextNode()) {
		const e = texts.currentNode.parentElement;
		if (!texts.currentNode.data.trim() || e.getClientRects().length === 0) continue;
		checked++;
		const [a, b] = [luminance(rgb(getComputedStyle(e).color)), luminance(background(e))];
		const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
		if (!(ratio >= 4.5)) low.push(texts.currentNode.data.trim() + ": " + ratio.toFixed(2));
	}
	return checked > 30 ? low : ["only " + checked + " texts are visible"];
})()`

// TestBrowserLayout: all texts are readable in both colour schemes, and neither the page nor a table scrolls
// horizontally.
func TestBrowserLayout(t *testing.T) {
	for _, scheme := range []string{"light", "dark"} {
		for name, width := range map[string]int64{"wide": 1280, "phone": 390} {
			t.Run(scheme+" "+name, func(t *testing.T) {
				b := newBrowser(t, clusterReport(), width, scheme)
				b.screenshot("page")
				if low := evaluate[[]string](b, contrasts); len(low) > 0 {
					t.Errorf("texts with a contrast below 4.5:\n%s", strings.Join(low, "\n"))
				}
				if dark := evaluate[bool](b, `matchMedia("(prefers-color-scheme: dark)").matches`); dark != (scheme == "dark") {
					t.Errorf("setup: got dark=%t in the scheme %s", dark, scheme)
				}
				const tooWide = `[document.documentElement, ...document.querySelectorAll(".scroll")]
					.filter(e => e.scrollWidth > e.clientWidth).map(e => e.tagName + " " + e.scrollWidth + " in " + e.clientWidth)`
				if got := evaluate[[]string](b, tooWide); len(got) > 0 {
					t.Errorf("got elements %q that are wider than the space for them", got)
				}
			})
		}
	}
}
