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

// The metric with the durations of calls in a driver, and its label with the method.
const (
	operations = "csi_plugin_operations_seconds"
	methodName = "method_name"
)

// driverTime is the number and the total duration of the calls in the drivers, by method.
type driverTime map[string]callTime

// callTime is the number and the total duration of calls.
type callTime struct {
	calls   uint64
	seconds float64
}

// scrape sums the metrics of the drivers at comma-separated URLs. It returns nil if urls is empty.
func scrape(ctx context.Context, urls string) (driverTime, error) {
	if urls == "" {
		return nil, nil
	}
	share := driverTime{}
	for url := range strings.SplitSeq(urls, ",") {
		if err := share.add(ctx, url); err != nil {
			return nil, fmt.Errorf("%s: %w", url, err)
		}
	}
	return share, nil
}

// add adds the metrics of a driver.
func (d driverTime) add(ctx context.Context, url string) error {
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

// since returns the calls that were made after before was scraped.
func (d driverTime) since(before driverTime) driverTime {
	delta := driverTime{}
	for method, now := range d {
		then := before[method]
		if now.calls > then.calls {
			delta[method] = callTime{now.calls - then.calls, now.seconds - then.seconds}
		}
	}
	return delta
}

// total returns the sum of the durations of all calls. It can exceed the elapsed time, because calls run in
// parallel.
func (d driverTime) total() time.Duration {
	var seconds float64
	for _, s := range d {
		seconds += s.seconds
	}
	return time.Duration(seconds * float64(time.Second))
}
