package main

import (
	"bytes"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// everyCommand returns the commands of both trees, each with its root first.
func everyCommand() []*cobra.Command {
	var all []*cobra.Command
	var visit func(c *cobra.Command)
	visit = func(c *cobra.Command) {
		all = append(all, c)
		for _, sub := range c.Commands() {
			visit(sub)
		}
	}
	visit(newRootCommand().Command)
	visit(newPluginCommand().Command)
	return all
}

// words returns the arguments of a command, without the name of the program.
func words(c *cobra.Command) []string {
	return strings.Fields(strings.TrimPrefix(c.CommandPath(), c.Root().CommandPath()))
}

// execute runs a command line of trivet in a new tree, and returns its output.
func execute(args ...string) (string, error) { return executeIn(newRootCommand(), args...) }

// executeLike runs a command line in a new tree like that of a command.
func executeLike(c *cobra.Command, args ...string) (string, error) {
	return executeIn(treeOf(c), args...)
}

// treeOf returns a new tree like that of a command.
func treeOf(c *cobra.Command) root {
	if c.Root().Name() == pluginName {
		return newPluginCommand()
	}
	return newRootCommand()
}

func executeIn(r root, args ...string) (string, error) {
	var out bytes.Buffer
	r.SetOut(&out)
	r.SetErr(&out)
	_, err := r.execute(args)
	return out.String(), err
}

// TestHelp: each command has texts, and help COMMAND and COMMAND --help print the same help with its flags.
func TestHelp(t *testing.T) {
	for _, c := range everyCommand() {
		if c.Short == "" || c.Long == "" || c.Example == "" && !c.HasSubCommands() {
			t.Errorf("%s lacks a short text, a long text or an example", c.CommandPath())
		}
		flag, err := executeLike(c, append(words(c), "--help")...)
		help, helpErr := executeLike(c, append([]string{"help"}, words(c)...)...)
		if err != nil || helpErr != nil || flag != help || !strings.Contains(flag, c.Long) || !c.DisableFlagParsing && !strings.Contains(flag, "--help") {
			t.Errorf("%s: got errors %v and %v, help\n%s\n%s\nwant its long text and flags twice", c.CommandPath(), err, helpErr, flag, help)
		}
	}
}

// TestUnknownFlag: each command refuses an unknown flag, and suggests each of its flags for a mistyped one.
func TestUnknownFlag(t *testing.T) {
	for _, c := range everyCommand() {
		if c.DisableFlagParsing {
			continue
		}
		_, err := executeLike(c, append(words(c), "--helpp")...)
		wantUsageError(t, err, c.CommandPath(), "unknown flag: --helpp (did you mean --help?)")
		if c.Flags().Lookup("output") != nil {
			_, err = executeLike(c, append(words(c), "--outptu", "json")...)
			wantUsageError(t, err, c.CommandPath(), "(did you mean --output?)")
		}
	}
}

// wantUsageError fails the test unless an error is a usage error of a command with a text.
func wantUsageError(t *testing.T, err error, command, text string) {
	t.Helper()
	var usage *usageError
	if !errors.As(err, &usage) || usage.command != command || !strings.Contains(err.Error(), text) {
		t.Errorf("%s: got error %v, want a usage error with %q", command, err, text)
	}
}

// TestOutputFlag: each command with --output names the allowed formats if the format is unknown, and completes
// them.
func TestOutputFlag(t *testing.T) {
	found := 0
	for _, c := range everyCommand() {
		if c.Flags().Lookup("output") == nil {
			continue
		}
		found++
		_, err := executeLike(c, append(words(c), "-o", "xml")...)
		wantUsageError(t, err, c.CommandPath(), `invalid argument "xml" for "-o, --output" flag: must be table, wide, json or yaml`)
		if c.Root().Name() != pluginName {
			wantCompletions(t, append(words(c), "--output", ""), "table", "wide", "json", "yaml")
		}
	}
	if found < 11 {
		t.Errorf("got %d commands with --output, want at least 11", found)
	}
}

// TestCompletions: commands, subcommands, arguments and values of flags are completed.
func TestCompletions(t *testing.T) {
	wantCompletions(t, []string{"vol"}, "volume-manager", "volumes")
	wantCompletions(t, []string{"volume-manager", ""}, "status", "wait")
	wantCompletions(t, []string{"help", "volume-manager", ""}, "status", "wait")
	wantCompletions(t, []string{"completion", ""}, "bash", "zsh", "fish")
	wantCompletions(t, []string{"driver", "--log-format", ""}, "text", "json")
	wantCompletions(t, []string{"driver", "--services", ""}, "controller,node", "controller", "node")
	wantCompletions(t, []string{"flexvolume", "un"}, "unmount")
	wantDirective(t, []string{"doctor", "--state-dir", ""}, cobra.ShellCompDirectiveFilterDirs)
	wantDirective(t, []string{"doctor", "--config", ""}, cobra.ShellCompDirectiveFilterFileExt)
}

// wantCompletions fails the test unless the completions of a command line begin with the wanted ones.
func wantCompletions(t *testing.T, line []string, want ...string) {
	t.Helper()
	out, err := execute(append([]string{cobra.ShellCompNoDescRequestCmd}, line...)...)
	if err != nil || !strings.HasPrefix(out, strings.Join(want, "\n")+"\n:") {
		t.Errorf("trivet %q: got error %v, completions\n%s\nwant %q", line, err, out, want)
	}
}

// wantDirective fails the test unless the shell completes a command line with files or directories.
func wantDirective(t *testing.T, line []string, want cobra.ShellCompDirective) {
	t.Helper()
	out, err := execute(append([]string{cobra.ShellCompNoDescRequestCmd}, line...)...)
	if err != nil || !strings.Contains("\n"+out, fmt.Sprintf("\n:%d\n", want)) {
		t.Errorf("trivet %q: got error %v, completions %q, want directive %d", line, err, out, want)
	}
}

// TestCompletionScripts: the script for each shell is complete, and bash accepts the one for bash.
func TestCompletionScripts(t *testing.T) {
	for _, shell := range shellNames {
		script, err := execute("completion", shell)
		if err != nil || !strings.Contains(script, "trivet") || !strings.Contains(script, "__complete") {
			t.Errorf("completion %s: got error %v, script %q", shell, err, script)
		}
		if shell != "bash" {
			continue
		}
		check := exec.Command("bash", "-n")
		check.Stdin = strings.NewReader(script)
		if out, err := check.CombinedOutput(); err != nil {
			t.Errorf("bash -n: %v: %s", err, out)
		}
	}
}

// ownCommand matches a command of trivet in a line of an example, up to a pipe, a redirection or the end of a
// substitution.
var ownCommand = regexp.MustCompile(`^ *(?:source <\()?(?:kubectl )?trivet (.*?)(?: \| .*| > .*|\))?\n?$`)

// TestExamples: the command tree accepts the commands of all examples.
func TestExamples(t *testing.T) {
	for _, c := range everyCommand() {
		found := 0
		for line := range strings.Lines(c.Example) {
			match := ownCommand.FindStringSubmatch(line)
			if match == nil {
				continue
			}
			found++
			if err := parses(treeOf(c), match[1]); err != nil {
				t.Errorf("%s: example %s: %v", c.CommandPath(), strings.TrimSpace(line), err)
			}
		}
		if c.Example != "" && found == 0 {
			t.Errorf("%s: the examples contain no command of trivet", c.CommandPath())
		}
	}
}

// parses reports whether the tree accepts a command line, with the words as the shell splits them.
func parses(r root, line string) error {
	out, err := exec.Command("bash", "-c", `printf '%s\n' `+line).Output()
	if err != nil {
		return err
	}
	c, args, err := r.Find(strings.Split(strings.TrimSpace(string(out)), "\n"))
	if err != nil || c.DisableFlagParsing {
		return err
	}
	if err := c.ParseFlags(args); err != nil {
		return err
	}
	return c.ValidateArgs(c.Flags().Args())
}
