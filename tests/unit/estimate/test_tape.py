from memprof.estimate.tape import Tape


def test_what_two_operators_keep_is_kept_once():
    tape = Tape(tokens=10, training=True)
    x = tape.add_input(8, 2, needs_grad=True, name="x")
    y = tape.record([x], 8, 2, name="y")
    a = tape.record([y], 8, 2, saves=[y], name="a")
    b = tape.record([y], 8, 2, saves=[y], name="b")
    tape.drop(y)
    assert tape.saved_bytes == 10 * 8 * 2
    tape.drop(a, b)
    assert tape.live == 10 * 8 * 2


def test_nothing_is_kept_without_a_gradient():
    tape = Tape(tokens=10, training=True)
    x = tape.add_input(8, 2, needs_grad=False, name="x")
    y = tape.record([x], 8, 2, saves=[x], saves_output=True)
    tape.drop(y)
    assert tape.saved_bytes == 0
    assert tape.live == 0
    assert tape.peak == 160


def test_a_view_keeps_the_whole():
    tape = Tape(tokens=1, training=True)
    x = tape.add_input(4, 4, needs_grad=True, name="x")
    whole = tape.record([x], 12, 4, name="whole")
    part = tape.view(whole, 4, "part")
    out = tape.record([part], 4, 4, saves=[part])
    tape.drop(whole, part, out)
    assert tape.saved_bytes == 48
    assert tape.live == 48


def test_the_gradient_of_a_part_is_one_of_the_whole():
    tape = Tape(tokens=1, training=True)
    x = tape.add_input(4, 4, needs_grad=True, name="x")
    whole = tape.record([x], 12, 4, name="whole")
    part = tape.view(whole, 4, "part")
    out = tape.record([part], 4, 4)
    tape.drop(whole, part, out)
    tape.peak = tape.live
    tape.run_backward(out)
    # 16 bytes of the part's beside 48 of the whole's, and these beside the input's.
    assert (tape.peak, tape.live) == (64, 16)


def test_what_the_output_is_not_made_of_has_no_gradient():
    tape = Tape(tokens=10, training=True)
    x = tape.add_input(8, 2, needs_grad=True, name="x")
    used, other = tape.record([x], 8, 2), tape.record([x], 8, 2)
    tape.drop(used, other)
    tape.run_backward(used)
    assert tape.live == x.num_bytes


def test_a_sum_without_gradients_has_none():
    tape = Tape(tokens=10, training=True)
    parts = [tape.add_input(8, 2, needs_grad=False, name="x") for _ in range(2)]
    total = tape.add(*parts)
    tape.drop(tape.record([total], 8, 2, saves=[total]), total)
    assert (total.needs_grad, tape.saved_bytes, tape.live) == (False, 0, 0)
    assert tape.add(parts[0], tape.add_input(8, 2, needs_grad=True, name="y")).needs_grad


def test_the_backward_gives_everything_back_and_leaves_gradients():
    tape = Tape(tokens=10, training=True)
    x = tape.add_input(8, 2, needs_grad=True, name="x")
    y = tape.record([x], 8, 2, saves=[x], trains=True, grad_bytes=1000, name="y")
    z = tape.add(x, y)
    tape.drop(y, z)
    assert tape.run_backward(z) == 1000
    # The gradient of x is there too.
    assert tape.live == 1000 + x.num_bytes
    # That of z is that of y and x as well; the second of x is added to it, before that of the parameter comes.
    assert tape.peak == 1000 + x.num_bytes


def test_a_sum_is_in_the_larger_type_and_each_part_has_a_gradient_in_its_own():
    tape = Tape(tokens=10, training=True)
    parts = [tape.add_input(8, itemsize, needs_grad=True, name="x") for itemsize in (2, 4)]
    total = tape.add(*parts)
    assert (total.itemsize, tape.live) == (4, 320)
    tape.drop(total)
    tape.run_backward(total)
    assert tape.live == 160 + 320 and tape.peak == 320 + 160 + 320


def test_autocast_makes_a_gradient_in_half_precision_first():
    peaks = []
    for half in (0, 500):
        tape = Tape(tokens=1, training=True)
        x = tape.add_input(1, 4, needs_grad=False, name="x")
        y = tape.record([x], 1, 4, trains=True, grad_bytes=1000, param_temp_bytes=half)
        tape.drop(y)
        tape.run_backward(y)
        peaks.append(tape.peak)
    assert peaks[1] - peaks[0] == 500


def test_a_custom_function_keeps_what_has_a_gradient_and_counts_it_once():
    """Of a layer's input, which is counted elsewhere, and of what has no gradient nothing; of a view the whole."""
    tape = Tape(tokens=10, training=True)
    x = tape.add_input(8, 2, needs_grad=True, name="x")
    for tensor in (x, tape.record([tape.add_input(8, 2, needs_grad=False, name="y")], 8, 2)):
        tape.keep(tensor)
    assert tape.kept_bytes == 0
    whole = tape.record([x], 12, 2)
    for tensor in (whole, tape.view(whole, 4, "part")):
        tape.keep(tensor)
    assert tape.kept_bytes == 10 * 12 * 2
