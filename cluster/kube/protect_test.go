package kube_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/trivet-csi/trivet/cluster/kube"
)

const jobsPath = "/apis/batch/v1/namespaces/trivet-system/cronjobs/"

// protectTest is a cluster with a ClassProtection. Of the claims, "data" has a class with the parameter, and "plain" has not.
type protectTest struct {
	*cluster

	calling          sync.Mutex // protects the fields below
	protected, ended []string   // the names of claims and of CronJobs, in the order of the calls
	fails            error
}

// protectedCluster runs a ClassProtection in a cluster that prepare has changed.
func protectedCluster(t *testing.T, prepare func(p *protectTest), test func(t *testing.T, p *protectTest)) {
	t.Helper()
	bubble(t, func(t *testing.T, c *cluster) {
		p := &protectTest{cluster: c}
		c.put("/api/v1/nodes/b", object{})
		c.put(classesPath+"kept", object{"provisioner": driverName, "parameters": object{"protect": "15m"}})
		c.put(classesPath+"other", object{"provisioner": "other", "parameters": object{"protect": "15m"}})
		c.put(classesPath+"plain", object{"provisioner": driverName})
		p.claim("data", "kept", nil)
		p.claim("plain", "plain", nil)
		p.claim("other", "other", nil)
		prepare(p)
		protection := kube.NewClassProtection(kube.ClassProtectionOptions{
			Driver: driverName, Namespace: "trivet-system",
			Protect: func(_ context.Context, all []kube.ProtectedClaim) (errs []error) {
				p.calling.Lock()
				defer p.calling.Unlock()
				for _, claim := range all {
					p.protected = append(p.protected, claim.Name+" "+claim.Class+" "+claim.Every)
					errs = append(errs, p.fails)
					if p.fails == nil {
						p.job(claim.Name, claim.Class, "b")
					}
				}
				return errs
			},
			End: func(_ context.Context, all []kube.CronJob) error {
				p.calling.Lock()
				defer p.calling.Unlock()
				for _, job := range all {
					p.ended = append(p.ended, job.Metadata.Name)
					c.remove(jobsPath + job.Metadata.Name)
				}
				return nil
			},
		})
		start(t, func(ctx context.Context) { protection.Run(ctx, user{cluster: c}.connect) })
		p.wait(5 * time.Second) // several watches may begin one after the other
		test(t, p)
	})
}

// claim creates a bound claim, whose UID is its name.
func (p *protectTest) claim(name, class string, change object) {
	p.put(claimsPath+name, merge(object{"metadata": object{"namespace": "ns", "uid": name}, "spec": object{"storageClassName": class}, "status": object{"phase": "Bound"}}, change))
}

// job creates the CronJob of a claim.
func (p *protectTest) job(uid, class, node string) {
	p.put(jobsPath+uid, object{"metadata": object{
		"labels": object{kube.ProtectKey: uid}, "annotations": object{kube.ByClassKey: class, kube.CopiesNodeKey: node},
	}})
}

// fail sets the answer of Protect, and forgets the calls so far.
func (p *protectTest) fail(err error) {
	p.calling.Lock()
	defer p.calling.Unlock()
	p.fails, p.protected = err, nil
}

// attempts returns the number of calls of Protect for a claim.
func (p *protectTest) attempts() int {
	p.calling.Lock()
	defer p.calling.Unlock()
	return len(p.protected)
}

func (p *protectTest) wait(d time.Duration) {
	time.Sleep(d) // of the bubble
	synctest.Wait()
}

// want checks which claims were protected and which protections were ended since the last call.
func (p *protectTest) want(t *testing.T, protected, ended []string) {
	t.Helper()
	p.calling.Lock()
	defer p.calling.Unlock()
	if !slices.Equal(p.protected, protected) || !slices.Equal(p.ended, ended) {
		t.Errorf("got the claims %q protected and the CronJobs %q ended, want %q and %q", p.protected, p.ended, protected, ended)
	}
	p.protected, p.ended = nil, nil
}

var protectedOnce = []string{"data kept 15m"}

// TestClassProtection: a claim whose class has the parameter is protected once, and again after the loss of the node, of the CronJob,
// or after a move. The protection of a claim that does not exist any more is ended.
func TestClassProtection(t *testing.T) {
	protectedCluster(t, func(*protectTest) {}, func(t *testing.T, p *protectTest) {
		p.want(t, protectedOnce, nil)
		p.wait(time.Hour)
		p.want(t, nil, nil)
		p.claim("new", "kept", nil)
		p.wait(time.Second)
		p.want(t, []string{"new kept 15m"}, nil)
		p.remove(jobsPath + "data")
		p.wait(time.Minute)
		p.want(t, protectedOnce, nil)
		p.claim("data", "kept", object{"metadata": object{"annotations": object{kube.MoveKey: "1 copy"}}})
		p.wait(time.Minute)
		p.want(t, nil, nil)
		p.claim("data", "kept", nil)
		p.wait(time.Second)
		p.want(t, protectedOnce, nil)
		p.remove(claimsPath + "new")
		p.wait(time.Second)
		p.want(t, nil, []string{"new"})
		p.fail(errors.New("no other node"))
		p.wait(time.Minute)
		p.want(t, nil, nil)
		p.put("/api/v1/nodes/b", object{"spec": object{"taints": []any{object{"key": kube.OutOfService}}}})
		p.wait(15 * time.Second)
		p.want(t, protectedOnce, nil)
	})
}

// TestClassProtectionNotNeeded: claims that are not bound, are being deleted, or are copies are not protected, nor is one that a user
// has protected. Without a class with the parameter, no claim is read.
func TestClassProtectionNotNeeded(t *testing.T) {
	for name, change := range map[string]object{
		"not bound":     {"status": object{"phase": "Pending"}},
		"being deleted": {"metadata": object{"deletionTimestamp": "2020-01-01T00:00:00Z"}},
		"a copy":        {"metadata": object{"labels": object{kube.ProtectKey: "x"}}},
		"being moved":   {"metadata": object{"labels": object{kube.MoveKey: "x"}}},
	} {
		t.Run(name, func(t *testing.T) {
			protectedCluster(t, func(p *protectTest) { p.claim("data", "kept", change) }, func(t *testing.T, p *protectTest) {
				p.want(t, nil, nil)
			})
		})
	}
	t.Run("by a user", func(t *testing.T) {
		protectedCluster(t, func(p *protectTest) { p.job("data", "", "gone"); p.job("unknown", "", "b") }, func(t *testing.T, p *protectTest) {
			p.wait(time.Hour)
			p.want(t, nil, nil)
		})
	})
	t.Run("no class", func(t *testing.T) {
		protectedCluster(t, func(p *protectTest) { p.remove(classesPath + "kept") }, func(t *testing.T, p *protectTest) {
			p.want(t, nil, nil)
			if n := p.called("WATCH persistentvolumeclaims"); n != 0 {
				t.Errorf("got %d reads of the claims, want none", n)
			}
		})
	})
}

// TestClassProtectionMany: a claim without a protection is protected before others are examined, of which there may be many after the
// controller has started.
func TestClassProtectionMany(t *testing.T) {
	const many = 250
	protectedCluster(t, func(p *protectTest) {
		for i := range many {
			name := fmt.Sprintf("c%d", i)
			p.claim(name, "kept", nil)
			p.job(name, "kept", "b")
		}
	}, func(t *testing.T, p *protectTest) {
		p.calling.Lock()
		defer p.calling.Unlock()
		if len(p.protected) != many+1 || p.protected[0] != protectedOnce[0] {
			t.Errorf("got %d claims, the first %q, want %d, and first the one without a protection", len(p.protected), p.protected[0], many+1)
		}
	})
}

// TestClassProtectionFails: a claim that cannot be protected gets one event, and is tried again.
func TestClassProtectionFails(t *testing.T) {
	protectedCluster(t, func(p *protectTest) { p.fail(errors.New("no room")) }, func(t *testing.T, p *protectTest) {
		p.wait(3 * time.Hour)
		events := p.paths("/api/v1/namespaces/ns/events")
		if len(events) != 1 || p.attempts() < 36 || p.attempts() > 45 {
			t.Fatalf("got the events %q after %d attempts, want one event, and an attempt every five minutes", events, p.attempts())
		}
		e := p.get(events[0])
		if text(e, "reason") != "ProtectionFailed" || text(e, "involvedObject", "uid") != "data" || text(e, "message") != "StorageClass kept has protect: 15m, but the claim cannot be protected: no room" {
			t.Errorf("got the event %v, want the claim and the reason", e)
		}
		p.fail(nil)
		p.wait(6 * time.Minute)
		p.want(t, protectedOnce, nil)
	})
}
