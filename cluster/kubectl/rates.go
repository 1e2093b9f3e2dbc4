package kubectl

import (
	"cmp"
	"slices"

	"github.com/trivet-csi/trivet/cluster/status"
)

// VolumeRate is the I/O of a volume between two reports, per second.
type VolumeRate struct {
	ID           string  `json:"id"`
	Name         string  `json:"name"`
	Node         string  `json:"node"`
	Reads        float64 `json:"readsPerSecond"`
	ReadBytes    float64 `json:"readBytesPerSecond"`
	Writes       float64 `json:"writesPerSecond"`
	WrittenBytes float64 `json:"writtenBytesPerSecond"`
	BusyPercent  float64 `json:"busyPercent"`
}

// CallRate describes the calls of a method to a driver between two reports.
type CallRate struct {
	Node    string `json:"node,omitempty"`
	Method  string `json:"method"`
	Running int    `json:"running"`
	// Count and Failed are the numbers of calls that were completed or failed between the reports.
	Count  uint64 `json:"count"`
	Failed uint64 `json:"failed"`
	// MeanSeconds is the mean duration of these calls; 0 if there were none.
	MeanSeconds float64 `json:"meanSeconds"`
}

// VolumeRates returns the rates of the volumes that are attached in both reports, the highest first. A volume
// with another device, or whose counters have become smaller, was attached again and is left out.
func VolumeRates(before, after status.Report) []VolumeRate {
	seconds := after.Time.Sub(before.Time).Seconds()
	old := map[string]status.IO{}
	key := func(v status.Volume) string { return v.Node + " " + v.ID + " " + v.Device }
	for _, v := range before.Volumes {
		if v.IO != nil {
			old[key(v)] = *v.IO
		}
	}
	var rates []VolumeRate
	for _, v := range after.Volumes {
		was, known := old[key(v)]
		if v.IO == nil || !known || seconds <= 0 || v.IO.Reads < was.Reads || v.IO.Writes < was.Writes {
			continue
		}
		per := func(now, then uint64) float64 { return float64(now-then) / seconds }
		rates = append(rates, VolumeRate{
			ID: v.ID, Name: v.Name, Node: v.Node,
			Reads: per(v.IO.Reads, was.Reads), ReadBytes: per(v.IO.ReadBytes, was.ReadBytes),
			Writes: per(v.IO.Writes, was.Writes), WrittenBytes: per(v.IO.WrittenBytes, was.WrittenBytes),
			BusyPercent: min(100, (v.IO.BusySeconds-was.BusySeconds)/seconds*100),
		})
	}
	slices.SortStableFunc(rates, func(a, b VolumeRate) int {
		return cmp.Compare(b.ReadBytes+b.WrittenBytes, a.ReadBytes+a.WrittenBytes)
	})
	return rates
}

// CallRates returns the methods that have running calls, or calls that were completed between the reports: first
// those with running calls, then by the number of calls.
func CallRates(before, after status.Report) []CallRate {
	type key struct{ node, method string }
	old := map[key]status.Call{}
	for _, p := range before.Processes {
		for _, c := range p.Calls {
			old[key{p.Node, c.Method}] = c
		}
	}
	var rates []CallRate
	for _, p := range after.Processes {
		for _, c := range p.Calls {
			was := old[key{p.Node, c.Method}]
			if c.Count < was.Count { // the driver has restarted
				was = status.Call{}
			}
			r := CallRate{Node: p.Node, Method: c.Method, Running: c.Running, Count: c.Count - was.Count, Failed: c.Failed - was.Failed}
			if r.Count > 0 {
				r.MeanSeconds = (c.TotalSeconds - was.TotalSeconds) / float64(r.Count)
			}
			if r.Count > 0 || r.Running > 0 {
				rates = append(rates, r)
			}
		}
	}
	slices.SortStableFunc(rates, func(a, b CallRate) int {
		return cmp.Or(cmp.Compare(b.Running, a.Running), cmp.Compare(b.Count, a.Count))
	})
	return rates
}
