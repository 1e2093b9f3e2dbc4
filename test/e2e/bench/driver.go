package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

const (
	operations = "csi_plugin_operations_seconds"
	methodName = "method_name"
)

// driverShare is the time that calls spent in the driver, by method.
type driverShare map[string]spent

type spent struct {
	calls   uint64
	seconds float64
}

// scrape adds up the metrics of the drivers at the URLs.
func scrape(ctx context.Context, urls string) (driverShare, error) {
	if urls == "" {
		return nil, nil
	}
	share := driverShare{}
	for url := range strings.SplitSeq(urls, ",") {
		if err := share.add(ctx, url); err != nil {
			return nil, fmt.Errorf("%s: %w", url, err)
		}
	}
	return share, nil
}

func (d driverShare) add(ctx context.Context, url string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(answer.Body)
	if err != nil {
		return err
	}
	for _, m := range families[operations].GetMetric() {
		for _, l := range m.GetLabel() {
			if l.GetName() == methodName {
				s := d[l.GetValue()]
				s.calls += m.GetHistogram().GetSampleCount()
				s.seconds += m.GetHistogram().GetSampleSum()
				d[l.GetValue()] = s
			}
		}
	}
	return nil
}

func (d driverShare) since(before driverShare) driverShare {
	delta := driverShare{}
	for method, now := range d {
		was := before[method]
		if now.calls > was.calls {
			delta[method] = spent{now.calls - was.calls, now.seconds - was.seconds}
		}
	}
	return delta
}

// total is the sum of the times of all calls. Calls run in parallel, so it exceeds the waiting
// time.
func (d driverShare) total() time.Duration {
	var seconds float64
	for _, s := range d {
		seconds += s.seconds
	}
	return time.Duration(seconds * float64(time.Second))
}
