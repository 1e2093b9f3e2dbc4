package driver_test

import (
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
)

// TestCrowdAtMetrics: connections to the metrics port that are kept open are bounded, and
// keep neither the scraper nor callers at the socket out.
func TestCrowdAtMetrics(t *testing.T) {
	o := options(t)
	o.HTTPAddress = backendtest.FreeAddress(t)
	d := backendtest.StartWith(t, o)
	client := &http.Client{Transport: &http.Transport{}}
	scrape(t, client, o.HTTPAddress)
	for name, say := range map[string]string{
		"silent":         "",
		"idle":           "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
		"in the headers": "GET /metrics HTTP/1.1\r\nHost: ",
	} {
		t.Run(name, func(t *testing.T) {
			const many, most = 300, 64
			closed := make(chan struct{}, many)
			dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
			for range many {
				conn, err := dialer.DialContext(t.Context(), "tcp", o.HTTPAddress)
				must(t, err)
				t.Cleanup(func() { _ = conn.Close() })
				_, err = io.WriteString(conn, say)
				must(t, err)
				go func() {
					_, _ = io.Copy(io.Discard, conn)
					closed <- struct{}{}
				}()
			}
			await(t, "the end of those that are too many", func() bool { return len(closed) >= many-most })
			if !scrape(t, client, o.HTTPAddress) {
				t.Error("the scraper's connection was closed")
			}
			must(t, probe(t.Context(), d.Identity))
		})
	}
}

// scrape reads the metrics, and reports whether that was by the connection of the last time.
func scrape(t *testing.T, client *http.Client, address string) (reused bool) {
	t.Helper()
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{GotConn: func(info httptrace.GotConnInfo) { reused = info.Reused }})
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/metrics", http.NoBody)
	must(t, err)
	resp, err := client.Do(req)
	must(t, err)
	defer func() { _ = resp.Body.Close() }()
	if n, err := io.Copy(io.Discard, resp.Body); err != nil || n == 0 || resp.StatusCode != http.StatusOK {
		t.Errorf("%d bytes, %s, %v", n, resp.Status, err)
	}
	return reused
}
